"""What every op of fuzz.py has to return, by definitions of its own: float64, loops and the text of the standard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernels_reference as ref
import torch
from fuzz_calls import SLOTS, Call
from mxfp4_ops import BACKENDS, Activation, ExpertWeights
from mxfp4_ops.backends import Tolerance
from problems import MAGNITUDES, answer, decode, errors
from torch import Tensor

EVEN_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)  # of two magnitudes at one distance, the even code wins


def plain(tensor: Tensor) -> Tensor:
    """Contiguous, without lazy negation, bytes as uint8."""
    whole = tensor.detach().resolve_neg().contiguous()
    return whole.view(torch.uint8) if whole.dtype in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2) else whole


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in a row."""
    whole = plain(tensor)
    flat = whole.new_empty(whole.numel())  # not clone(): a dimension of size one keeps any stride
    return flat.copy_(whole.view(-1)).view(torch.uint8)


def same(found: Tensor, wanted: Tensor) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), (found.shape, found.dtype, wanted.shape)
    nan = torch.isnan(wanted) if wanted.dtype.is_floating_point else torch.zeros_like(wanted, dtype=torch.bool)
    assert torch.equal(torch.isnan(found) if wanted.dtype.is_floating_point else nan, nan), "NaN elsewhere"
    assert torch.equal(found[~nan], wanted[~nan]), "other values"


def quant_answer(x: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    groups = plain(x).double().unflatten(-1, (x.shape[-1] // 32, 32))
    largest = groups.abs().amax(-1) if groups.numel() else groups.new_zeros(groups.shape[:-1])
    bad = ~torch.isfinite(groups).all(-1)
    fraction, exponent = torch.frexp(torch.where(bad, 1.0, largest))  # fraction in [1/2, 1)
    up = {"floor": fraction > 1, "ceil": fraction > 0.5, "even": fraction >= 0.875, "rceil": fraction > 0.75}[rule]
    up = up & (largest >= 2.0**-126)  # subnormals have no exponent of their own: byte 0 holds them
    byte = torch.where(largest > 0, exponent - 1 + 125 + up, 0).clamp_min(0)
    size = groups.abs() / torch.ldexp(torch.ones_like(largest), byte - 127)[..., None]
    order = torch.tensor(EVEN_FIRST)
    distance = (size[..., None] - torch.tensor(MAGNITUDES, dtype=torch.float64)[order]).abs().nan_to_num(0.0)
    codes = order[distance.argmin(-1)] | torch.signbit(groups).long() << 3
    codes = torch.where(bad[..., None], 0, codes).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, torch.where(bad, 255, byte).to(torch.uint8)


def _quant(call: Call, out: Any) -> None:
    blocks, scales = quant_answer(call.args["x"], call.args["scale_rule"])
    same(out[0], blocks)
    same(out[1], scales)


def _qdq(call: Call, out: Any) -> None:
    rule = call.args.get("scale_rule", call.args.get("scale_calculation_mode"))
    same(out, decode(*quant_answer(call.args["x"], rule)).float().to(call.args["x"].dtype))


def _dequant(call: Call, out: Any) -> None:
    a = call.args
    blocks, scales = (plain(a[n]) for n in (("x", "scale") if "x" in a else ("blocks", "scales")))
    dtype = a["out"].dtype if "out" in a else a.get("dtype", a.get("float_dtype")) or torch.bfloat16
    same(a.get("out", out), decode(blocks, scales).float().to(dtype))


def _rows_of(ids: Tensor, numbers: Tensor) -> Tensor:
    place = {int(n): row for row, n in enumerate(numbers.tolist())}
    return torch.tensor([place.get(i, -1) for i in plain(ids).flatten().tolist()], dtype=ids.dtype).view(ids.shape)


def _localise(call: Call, out: Any) -> None:
    same(out, _rows_of(call.args["topk_ids"], call.args["expert_ids"]))


def _native_bytes(packed: Tensor, rows: int, k: int, halves: int) -> tuple[Tensor, Tensor]:
    """Rows of codes and of scale bytes of tiles, by docs/layouts.md; halves of ``rows`` rows each."""
    experts, tiles, supers, _ = packed.shape
    scales = (
        packed[..., :64].view(experts, tiles, supers, 2, 32).permute(0, 1, 4, 2, 3).reshape(experts, -1, supers * 2)
    )
    words = packed[..., 64:].view(experts, tiles, supers, 8, 2, 16, 4)  # step, half, lane, byte
    nibbles = torch.stack((words & 15, words >> 4), -1).flatten(-2)
    codes = torch.empty_like(nibbles)
    codes[..., ref.NIBBLE_TO_K] = nibbles
    codes = codes.permute(0, 1, 4, 5, 2, 3, 6).reshape(experts, -1, supers * 64)
    both = []
    for width, rows_of_all in ((k, codes), (k // 32, scales)):
        if halves == 2:
            turns = rows_of_all.unflatten(1, (-1, 2, 16)).transpose(1, 2).flatten(2, 3)
            rows_of_all = turns[:, :, :rows].flatten(1, 2)
        both.append(rows_of_all[:, : rows * halves, :width])
    return both[0][..., 0::2] | both[0][..., 1::2] << 4, both[1]


def _held(six: list[Tensor | None], layout: str, hidden: int, intermediate: int, gated: bool) -> list[Tensor]:
    """The canonical tensors that packed ones stand for; an absent bias has size zero."""
    w13, s13, b13, w2, s2, b2 = (torch.empty(0, 0) if t is None else plain(t) for t in six)
    halves = 2 if gated else 1
    if layout != "canonical":
        w13, s13 = _native_bytes(w13, intermediate, hidden, halves)
        w2, s2 = _native_bytes(w2, hidden, intermediate, 1)
        b2 = b2[:, :hidden]
        if b13.numel():
            b13 = torch.cat([b[:, :intermediate] for b in b13.chunk(halves, 1)], 1)
    return [w13, s13, b13, w2, s2, b2]


def _moe(call: Call, out: Tensor) -> None:
    a = call.args
    x, ids, routing = (plain(a[n]) for n in ("x", "topk_ids", "topk_weights"))
    assert out.shape == x.shape and out.dtype is x.dtype
    ids = ids if a["expert_ids"] is None else _rows_of(ids, a["expert_ids"])
    assert all(0 <= i < len(a["w13"]) or i == -1 for i in ids.flatten().tolist()), "an id was accepted"
    six = [a[n] for n in SLOTS]
    held = _held(six, a["layout"], a["hidden"], a["intermediate"], not a["activation"].endswith("_no_mul"))
    held = [t if t.numel() else None for t in held]
    if any(((s > 200) & (s < 255)).any() for s in (held[1], held[4]) if s is not None):
        return  # where float32 ends the order of products matters; test_extreme_scale_bytes has these by hand
    experts = ExpertWeights(*held)
    act = Activation(a["activation"], a.get("alpha"), a.get("beta"), a.get("limit"))
    wanted = answer(experts, x, ids, routing.float(), act, weight_on_input=a.get("weight_on_input", False))
    wanted = torch.where(wanted.abs() > torch.finfo(x.dtype).max, torch.inf, wanted)
    fine = torch.isfinite(wanted).all(1) & (wanted.abs().amax(1) < 1e4) & (x.double().abs().amax(1) < 1e4)
    assert not torch.isfinite(out[~torch.isfinite(wanted)]).any(), "a finite result for a NaN or an infinity"
    tolerance: Tolerance = next(b.tolerance for b in BACKENDS if b.layout.tag == a["layout"])
    bound = tolerance.of(x.dtype) * tolerance.worst_row  # what a row may have, and these calls have few
    least = max(1e-30, 4 * torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps * x.shape[1] / bound)
    tiny = fine & (wanted.norm(dim=1) < least)  # where the dtype of the result ends
    assert out[tiny].double().norm(dim=1).le(2 * least).all(), "a large result for a tiny one"
    fine &= ~tiny
    if fine.any():
        whole, worst = errors(out[fine], wanted[fine])
        assert max(whole, worst) < bound, f"error {whole:.2e}, worst row {worst:.2e}"


def _in_halves(t: Tensor, interleaved: bool) -> Tensor:
    return torch.cat((t[:, 0::2], t[:, 1::2]), 1) if interleaved else t


def _native_layout(w: Tensor, scale: Tensor, halves: int) -> Tensor:
    codes = torch.stack((w & 15, w >> 4), -1).flatten(-2)
    return torch.from_numpy(ref.pack_matrix(codes.numpy(), scale.numpy(), halves))


def _prepare(call: Call, out: list[Tensor]) -> None:
    a = call.args
    turned = a["interleaved"]
    w13, s13, w2, s2 = (plain(a[n]) for n in ("w13", "w13_scale", "w2", "w2_scale"))
    w13, s13 = _in_halves(w13, turned), _in_halves(s13, turned)
    halves = 1 if a["activation"].endswith("_no_mul") else 2
    native = a["layout"] != "canonical"
    none = w13.new_empty(len(w13), 0)
    wanted = [_native_layout(w13, s13, halves), none, _native_layout(w2, s2, 1), none] if native else [w13, s13, w2, s2]
    for found, tensor in zip((out[0], out[1], out[3], out[4]), wanted, strict=True):
        same(found, tensor)
    for found, bias, parts in ((out[2], a["w13_bias"], halves), (out[5], a["w2_bias"], 1)):
        if bias is None or not bias.numel():
            assert found.shape == (len(w13), 0)
            continue
        bias = _in_halves(plain(bias), turned and parts == halves == 2)
        width = -(-(bias.shape[1] // parts) // 64) * 64 if native else bias.shape[1] // parts
        padded = [torch.nn.functional.pad(p, (0, width - p.shape[1])) for p in bias.chunk(parts, 1)]
        same(found, torch.cat(padded, 1))


def _unprepare(call: Call, out: list[Tensor]) -> None:
    a = call.args
    _same_experts(out, _held(a["packed"], a["layout"], a["hidden"], a["intermediate"], a.get("gated", True)))


def _same_experts(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.numel() == 0 if not b.numel() else torch.equal(raw(a), raw(b)), "other bytes"


def _repack(call: Call, out: None) -> None:
    a, problem, before = call.args, call.facts["problem"], call.facts["packed"]
    sizes = (a["layout"], problem.hidden, problem.intermediate, problem.gated)
    wanted = [t.clone() for t in _held(before, *sizes)]
    for stack, name in zip(wanted, SLOTS, strict=True):
        if stack.numel():
            one = plain(a[name])
            turned = a.get("interleaved") and name.startswith("w13")
            stack[a["expert"]] = torch.cat((one[0::2], one[1::2])) if turned else one
    _same_experts(_held(a["packed"], *sizes), wanted)


def _route(call: Call, out: tuple[Tensor, Tensor]) -> None:
    a, (ids, wts) = call.args, out
    if abs(a.get("scale", 1.0)) > torch.finfo(torch.float32).max:
        return  # infinite in float32
    logits = plain(a["logits"]).float().double()
    assert ids.shape == wts.shape == (len(logits), a["top_k"]) and ids.dtype is torch.int32
    for row, chosen, weight in zip(logits, ids.long(), wts.double(), strict=True):
        if not torch.isfinite(row).all():
            continue
        assert len(set(chosen.tolist())) == len(chosen)
        scores = row.softmax(0)
        torch.testing.assert_close(
            scores[chosen], scores.sort(descending=True).values[: len(chosen)], atol=1e-6, rtol=1e-5
        )
        if a.get("renormalize", True):
            scores = scores / scores[chosen].sum()
        wanted = (scores[chosen] * a.get("scale", 1.0)).float().double()  # infinite where float32 ends
        torch.testing.assert_close(weight, wanted, rtol=1e-4, atol=1e-6, equal_nan=True)


ANSWERS: dict[str, Callable[[Call, Any], None]] = {
    "quant": _quant, "qdq": _qdq, "qdq_mxfp4": _qdq, "dequant": _dequant, "dequant_mxfp4": _dequant,
    "dequant.out": _dequant, "moe": _moe, "mxfp4_moe": _moe, "function": _moe, "prepare_moe": _prepare,
    "unprepare_moe": _unprepare, "repack_expert": _repack, "localise": _localise, "route": _route,
}  # fmt: skip
