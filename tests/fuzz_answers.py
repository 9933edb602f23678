"""What every op of fuzz.py has to return, by definitions of its own: integers, float64, loops and the text of the
standard. Here are the numbers and routing; layers and layouts have files of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import exact
import fuzz_layer_answers as layer
import fuzz_layout_answers as layouts
import torch
from fuzz_calls import OPS, Call
from fuzz_layout_answers import plain, same
from mxfp4_ops import QUANT_MODES
from mxfp4_ops.routing import METHODS
from problems import MAGNITUDES, decode
from test_route import allowed64, near
from torch import Tensor
from x_format_reference import round_rows

_LARGE = 1e4  # a bias beyond it leaves nothing of the scores


# --- quant, dequant, qdq ----------------------------------------------------------------------------------------------


def quant_answer(x: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes by a rule of our own, by integers."""
    groups = plain(x).float().unflatten(-1, (x.shape[-1] // 32, 32))
    if not groups.numel():
        return torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.uint8), torch.empty(
            groups.shape[:-1], dtype=torch.uint8
        )
    codes, scales = exact.quant_array(groups.numpy(), rule)
    return torch.from_numpy(exact.pack(codes)).flatten(-2), torch.from_numpy(scales)


def _near_codes(x: Tensor, blocks: Tensor, scales: Tensor, mode: str) -> None:
    """Blocks of ordinary numbers: a scale next to that of "even", and no other value nearer than the chosen one."""
    groups = plain(x).double().unflatten(-1, (x.shape[-1] // 32, 32))
    even = quant_answer(x, "even")[1].int()
    largest = groups.abs().amax(-1)
    ordinary = (largest > 2.0**-100) & (largest < 2.0**100)  # false for NaN
    assert ((scales.int() - even).abs() <= 1)[ordinary].all(), "a scale far from the maximum"
    if not ordinary.any():
        return
    values = decode(blocks, scales).unflatten(-1, (-1, 32))[ordinary]
    step = torch.ldexp(torch.ones_like(largest[ordinary]), scales[ordinary].int() - 127)[:, None, None]
    size = groups[ordinary].abs()
    least = (size[..., None] - torch.tensor(MAGNITUDES, dtype=torch.float64) * step).abs().amin(-1)
    assert torch.equal((size - values.abs()).abs(), least), "not the nearest value"
    assert (values * groups[ordinary] >= 0).all(), "another sign"
    if mode == "mse":
        for shift in (-2.0, -1.0, 1.0, 2.0):
            other = size[..., None] - torch.tensor(MAGNITUDES, dtype=torch.float64) * step * 2**shift
            assert (least.square().sum(-1) <= other.abs().amin(-1).square().sum(-1) * (1 + 1e-12)).all(), "not least"


def quantized(x: Tensor, mode: str, blocks: Tensor, scales: Tensor) -> None:
    if mode in exact.RULES:
        wanted = quant_answer(x, mode)
        same(blocks, wanted[0])
        same(scales, wanted[1])
        return
    assert blocks.dtype is scales.dtype is torch.uint8
    assert blocks.shape == (*x.shape[:-1], x.shape[-1] // 2) and scales.shape == (*x.shape[:-1], x.shape[-1] // 32)
    for first, second in zip((blocks, scales), OPS.quant(plain(x), scale_rule=mode), strict=True):
        same(first, second)  # however x lies in memory
    if x.numel():
        _near_codes(x, blocks, scales, mode)


def _quant(call: Call, out: Any) -> None:
    quantized(call.args["x"], call.args["scale_rule"], *out)


def _qdq(call: Call, out: Any) -> None:
    x, mode = call.args["x"], call.args.get("scale_rule", call.args.get("scale_calculation_mode"))
    pair = quant_answer(x, mode) if mode in exact.RULES else OPS.quant(plain(x), scale_rule=mode)
    same(out, decode(*pair).float().to(x.dtype))


def _dequant(call: Call, out: Any) -> None:
    a = call.args
    blocks, scales = (plain(a[n]) for n in (("x", "scale") if "x" in a else ("blocks", "scales")))
    dtype = a["out"].dtype if "out" in a else a.get("dtype", a.get("float_dtype")) or torch.bfloat16
    same(a.get("out", out), decode(blocks, scales).float().to(dtype))


def _quantize_experts(call: Call, out: list[Tensor]) -> None:
    a = call.args
    assert a["scale_rule"] in QUANT_MODES and a["order"] in ("out_in", "in_out")
    for name, codes, scales in (("w13", *out[:2]), ("w2", *out[2:])):
        assert len(codes) == len(scales) == len(a[name])
        for e, matrix in enumerate(a[name]):
            quantized(matrix if a["order"] == "out_in" else matrix.T, a["scale_rule"], codes[e], scales[e])


def _quant_x(call: Call, out: tuple[Tensor, Tensor]) -> None:
    x, name = call.args["x"], call.args["x_format"]
    wanted = round_rows(plain(x).float(), name).float()
    same(layer.expanded(*out, name, x.shape[1]).float(), wanted)


# --- routing ----------------------------------------------------------------------------------------------------------


def _pack_topk(call: Call, out: Tensor) -> None:
    ids, weights = plain(call.args["topk_ids"]).long(), plain(call.args["topk_weights"]).float()
    bits = weights.view(torch.int32).long() & 0xFFFFFFFF
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    assert out.dtype is torch.int32 and torch.equal(out.long() >> 16, ids)
    number = ~weights.isnan()
    assert torch.equal((out.long() & 0xFFFF)[number], (rounded & 0xFFFF)[number])
    assert ((out.long() & 0x7FFF)[~number] > 0x7F80).all(), "NaN became a number"


def _unpack_topk(call: Call, out: tuple[Tensor, Tensor]) -> None:
    packed = plain(call.args["packed"])
    same(out[0], packed.long().div(1 << 16, rounding_mode="floor").int())
    assert out[1].dtype is torch.bfloat16 and out[1].shape == packed.shape
    assert torch.equal(out[1].view(torch.int16).long() & 0xFFFF, packed.long() & 0xFFFF)


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if score == "sigmoid" else (logits.clamp(min=0) + (-logits.abs()).exp().log1p()).sqrt()


def _chosen(a: dict[str, Any], row: Tensor, scores: Tensor, chosen: list[int], bias: Tensor | None) -> None:
    """The experts of one token whose logits are finite."""
    groups, kept = a.get("groups", 1), a.get("topk_groups", 1)
    choice = (row if bias is None else scores + bias).tolist()
    allowed = allowed64(choice, groups, kept, best=1 if bias is None else 2)
    want = sorted(allowed, key=lambda e: (-choice[e], e))[: len(chosen)]
    if bias is None or groups == 1:
        close = all(near(choice[c], choice[w]) for c, w in zip(chosen, want, strict=True))
        assert chosen == want or (bias is not None and close), f"{chosen} for {want}"
    else:  # groups whose sums nearly tie may change places
        size = len(choice) // groups
        sums = sorted(sum(sorted(choice[g * size :][:size])[-2:]) for g in range(groups))
        clear = kept == groups or not near(sums[-kept], sums[-kept - 1])
        assert not clear or all(near(choice[c], choice[w]) for c, w in zip(chosen, want, strict=True))


def _weighed(a: dict[str, Any], scores: Tensor, found: Tensor) -> None:
    total = scores.sum() if a.get("renormalize", True) else scores.new_ones(())
    if total > 1e-30:  # below it float32 ends
        wanted = scores / total * a.get("scale", 1.0)
        torch.testing.assert_close(found, wanted, rtol=3e-5, atol=1e-30)


def _route(call: Call, out: tuple[Tensor, Tensor]) -> None:
    a, (ids, weights) = call.args, out
    logits = plain(a["logits"]).float()
    method, bias, table = METHODS[a.get("method", "softmax_topk")], a["correction_bias"], a["hash_table"]
    bias = None if bias is None else plain(bias).float().double()
    assert ids.shape == weights.shape == (len(logits), a["top_k"])
    assert ids.dtype is torch.int32 and weights.dtype is torch.float32
    assert 2.0**-126 <= abs(a.get("scale", 1.0)) < 2.0**128 or a["scale"] == 0
    if table is not None:
        tokens, rows = plain(a["input_ids"]).tolist(), plain(table)
        assert all(0 <= token < len(rows) for token in tokens), "a token that does not exist"
        assert [rows[token].tolist() for token in tokens] == ids.tolist(), "not the table's experts"
    for row, chosen, found in zip(logits.double(), ids.tolist(), weights.double(), strict=True):
        assert min(chosen) >= 0 and max(chosen) < len(row) and (table is not None or len(set(chosen)) == len(chosen))
        if table is None and (row.isnan().any() or (bias is not None and bias.isnan().any())):
            assert found.isnan().all(), "a NaN does not show"
        if not row.isfinite().all() or (bias is not None and not (bias.abs() < _LARGE).all()):
            continue
        scores = _scores(row, method.score)
        if table is None:
            _chosen(a, row, scores, chosen, bias)
        _weighed(a, scores[torch.tensor(chosen)], found)


ANSWERS: dict[str, Callable[[Call, Any], None]] = {
    "quant": _quant, "qdq": _qdq, "qdq_mxfp4": _qdq, "dequant": _dequant, "dequant_mxfp4": _dequant,
    "dequant.out": _dequant, "quantize_experts": _quantize_experts, "quant_x": _quant_x,
    "pack_topk": _pack_topk, "unpack_topk": _unpack_topk, "route": _route, "localise": layer.localise,
    "moe": layer.moe, "mxfp4_moe": layer.moe, "function": layer.moe, "moe.out": layer.moe,
    "moe_unfinalized": layer.moe_unfinalized, "finalize": layer.finalize, "moe_backward": layer.moe_backward,
    "prepare_moe": layouts.prepare, "unprepare_moe": layouts.unprepare, "repack_expert": layouts.repack,
}  # fmt: skip
