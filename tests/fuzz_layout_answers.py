"""What ``prepare_moe``, ``unprepare_moe`` and ``repack_expert`` have to return, by the index formulas of
docs/layouts.md; and how fuzz.py compares tensors."""

from __future__ import annotations

import kernels_reference as ref
import torch
from fuzz_calls import Call
from mxfp4_ops.layout import SLOTS
from torch import Tensor


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


def logical_bias(bias: Tensor, size: int, halves: int) -> Tensor:
    """A bias without the padding of its halves."""
    return torch.cat([b[:, :size] for b in bias.chunk(halves, 1)], 1)


def held(six: list[Tensor | None], layout: str, hidden: int, intermediate: int, gated: bool) -> list[Tensor]:
    """The canonical tensors that packed ones stand for; an absent bias has size zero."""
    w13, s13, b13, w2, s2, b2 = (torch.empty(0, 0) if t is None else plain(t) for t in six)
    halves = 2 if gated else 1
    if layout != "canonical":
        w13, s13 = _native_bytes(w13, intermediate, hidden, halves)
        w2, s2 = _native_bytes(w2, hidden, intermediate, 1)
        b2 = logical_bias(b2, hidden, 1)
        if b13.numel():
            b13 = logical_bias(b13, intermediate, halves)
    return [w13, s13, b13, w2, s2, b2]


def _in_halves(t: Tensor, interleaved: bool) -> Tensor:
    return torch.cat((t[:, 0::2], t[:, 1::2]), 1) if interleaved else t


def _native_layout(w: Tensor, scale: Tensor, halves: int) -> Tensor:
    codes = torch.stack((w & 15, w >> 4), -1).flatten(-2)
    return torch.from_numpy(ref.pack_matrix(codes.numpy(), scale.numpy(), halves))


def prepare(call: Call, out: list[Tensor]) -> None:
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


def unprepare(call: Call, out: list[Tensor]) -> None:
    a = call.args
    _same_experts(out, held(a["packed"], a["layout"], a["hidden"], a["intermediate"], a.get("gated", True)))


def _same_experts(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.numel() == 0 if not b.numel() else torch.equal(raw(a), raw(b)), "other bytes"


def repack(call: Call, out: None) -> None:
    a, problem, before = call.args, call.facts["problem"], call.facts["packed"]
    sizes = (a["layout"], problem.hidden, problem.intermediate, problem.gated)
    wanted = [t.clone() for t in held(before, *sizes)]
    for stack, name in zip(wanted, SLOTS, strict=True):
        if stack.numel():
            one = plain(a[name])
            turned = a.get("interleaved") and name.startswith("w13")
            stack[a["expert"]] = torch.cat((one[0::2], one[1::2])) if turned else one
    _same_experts(held(a["packed"], *sizes), wanted)
