"""Our kernels in csrc/cpu: tiles of 32 rows, scales beside their codes, one layout for every instruction set.

A superblock is 64 k of 32 rows, 1088 bytes: 64 scale bytes [2 blocks of 32 k][32 rows], then 16 lines of 64 bytes, for
each step of 8 k the tile's rows 0..15, then 16..31. In a line a 4-byte word is a row, and its eight nibbles, lowest
first, are k = 0, 2, 4, 6, 1, 3, 5, 7 of the step: one shift then lines even k up with odd k as pairs for bf16 dot
instructions. A tile of a gated w13 holds 16 gate rows and the 16 up rows that belong to them, so that the activation
needs no second pass. 17/32 byte a weight, read as one stream. ``docs/layouts.md`` has the index formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .._extension import load_cpu
from ..activation import Resolved
from ..layout import Layout, Specs, TensorSpec
from ..problem import MoEProblem
from .base import Backend, Packed, need_arch, need_x_format

_ROWS, _HALF, _SUPER, _STEP = 32, 16, 64, 8  # rows of a tile and of a line; k of a superblock and of a step
_SCALES = _ROWS * _SUPER // 32  # scale bytes at the head of a superblock
_BYTES = _SCALES + _ROWS * _SUPER // 2
_SLAB = 16  # tiles that are packed at once: a large expert would need some 60 MB of int32 beside it (rule M1)
_NARROW_OR_WIDE = (torch.bfloat16, torch.float16, torch.float64)
_LOW_NIBBLES, _BYTE_PAIRS, _SHORT = 0x0F0F0F0F, 0x00FF00FF, 0x0000FFFF


def _specs(hidden: int, intermediate: int, gated: bool) -> Specs:
    rows = (2 if gated else 1) * intermediate
    return {
        "w13": TensorSpec((rows // _ROWS, hidden // _SUPER, _BYTES)),
        "w13_scale": TensorSpec((0,)),
        "w13_bias": TensorSpec((rows,), None),
        "w2": TensorSpec((hidden // _ROWS, intermediate // _SUPER, _BYTES)),
        "w2_scale": TensorSpec((0,)),
        "w2_bias": TensorSpec((hidden,), None),
    }


def _words(codes: Tensor) -> Tensor:
    """View rows of bytes [n, k/2] as one int32 a step of 8 k, [n, k/8]."""
    codes = codes.contiguous()
    return (codes.clone() if codes.storage_offset() % 4 else codes).view(torch.int32)


def _even_then_odd(words: Tensor) -> Tensor:
    """Move nibbles 0..7 of each int32 to the order 0, 2, 4, 6, 1, 3, 5, 7."""
    even, odd = words & _LOW_NIBBLES, (words >> 4) & _LOW_NIBBLES
    even, odd = ((h | (h >> 4)) & _BYTE_PAIRS for h in (even, odd))
    even, odd = ((h | (h >> 8)) & _SHORT for h in (even, odd))
    return even | (odd << 16)


def _natural_order(words: Tensor) -> Tensor:
    """Inverse of ``_even_then_odd``."""
    even, odd = words & _SHORT, (words >> 16) & _SHORT
    even, odd = ((h | (h << 8)) & _BYTE_PAIRS for h in (even, odd))
    even, odd = ((h | (h << 4)) & _LOW_NIBBLES for h in (even, odd))
    return even | (odd << 4)


def _tile_rows(rows: Tensor, paired: bool) -> Tensor:
    """rows [n, ...] to [tiles, 2, 16, ...]: line halves are gate and up rows where paired, else consecutive rows."""
    if paired:
        return rows.unflatten(0, (2, -1, _HALF)).transpose(0, 1)
    return rows.unflatten(0, (-1, 2, _HALF))


def _untile_rows(tiles: Tensor, paired: bool) -> Tensor:
    """Inverse of ``_tile_rows``."""
    return (tiles.transpose(0, 1) if paired else tiles).flatten(0, 2)


def _pack_matrix(codes: Tensor, scales: Tensor, paired: bool) -> Tensor:
    """codes [n, k/2], scales [n, k/32] to [n/32, k/64, 1088]."""
    tiles, supers = codes.shape[0] // _ROWS, codes.shape[1] * 2 // _SUPER
    out = codes.new_empty(tiles, supers, _BYTES)
    s = _tile_rows(scales.unflatten(1, (supers, 2)), paired)  # [tiles, 2, 16, supers, 2]
    out[..., :_SCALES] = s.permute(0, 3, 4, 1, 2).flatten(2)
    words = _tile_rows(_words(codes).unflatten(1, (supers, _SUPER // _STEP)), paired)
    for some, place in zip(words.split(_SLAB), out.split(_SLAB), strict=True):
        lines = _even_then_odd(some).permute(0, 3, 4, 1, 2).contiguous()  # [tiles, supers, step, half, 16]
        place[..., _SCALES:] = lines.view(torch.uint8).flatten(2)
    return out


def _unpack_matrix(packed: Tensor, paired: bool) -> tuple[Tensor, Tensor]:
    """Inverse of ``_pack_matrix``."""
    s = packed[..., :_SCALES].unflatten(2, (2, 2, _HALF)).permute(0, 3, 4, 1, 2)
    scales = _untile_rows(s, paired).flatten(1).contiguous()
    lines = packed[..., _SCALES:].contiguous().view(torch.int32).unflatten(2, (_SUPER // _STEP, 2, _HALF))
    words = _untile_rows(lines.permute(0, 3, 4, 1, 2), paired).flatten(1)
    return _natural_order(words).contiguous().view(torch.uint8), scales


def _pack(expert: Mapping[str, Tensor], gated: bool) -> dict[str, Tensor]:
    packed = dict(expert)
    for name, paired in (("w13", gated), ("w2", False)):
        packed[name] = _pack_matrix(expert[name], expert[f"{name}_scale"], paired)
        packed[f"{name}_scale"] = expert[name].new_empty(0)
    return packed


def _unpack(packed: Mapping[str, Tensor], gated: bool) -> dict[str, Tensor]:
    expert = dict(packed)
    for name, paired in (("w13", gated), ("w2", False)):
        expert[name], expert[f"{name}_scale"] = _unpack_matrix(packed[name], paired)
    return expert


def _why_not(problem: MoEProblem) -> Iterator[str]:
    yield from need_arch(problem, "cpu")
    absent = load_cpu()
    if absent:
        yield f"needs the compiled kernels: {absent}"
    yield from need_x_format(problem, "none")


def _run(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: Packed,
    activation: Resolved,
    *,
    hidden: int,
    intermediate: int,
    x_format: str,
    x_scale: Tensor | None,
    weight_on_input: bool,
    batch_invariant: bool,
) -> Tensor:
    return torch.ops.mxfp4._native_moe(
        x.contiguous(),
        ids.contiguous(),
        (weights.float() if weights.dtype in _NARROW_OR_WIDE else weights).contiguous(),
        packed["w13"],
        packed["w13_scale"],
        packed["w13_bias"],
        packed["w2"],
        packed["w2_scale"],
        packed["w2_bias"],
        hidden,
        intermediate,
        activation.code,
        activation.alpha,
        None if activation.beta == math.inf else activation.beta,
        None if activation.limit == math.inf else activation.limit,
        weight_on_input,
        batch_invariant,
    )


BACKEND = Backend(
    "native_cpu",
    Layout("native_cpu.tile32.v1", 64, 64, _specs, _pack, _unpack),
    _why_not,
    _run,
    checks_inputs=True,
    lowers=True,
)
