"""Every value of ``scale_rule``: four rules of our own, the search for the least error, and the quantizers of others.

``QUANT_MODES`` is the one table: the checks list its names, the definition below reads its columns, docs/format.md
shows it, and ``tests/golden/quantizers.json`` holds what the libraries answered. ``benchmarks/compare_quantizers.py``
runs them side by side with this module.

A mode of another library gives its bytes on every input for which the library's own answer is defined: signs of zero,
zero blocks, tiny and huge blocks, NaN and Inf. Where it is not (a float converted to an integer that cannot hold it),
NaN and Inf make scale byte 255 and codes 0, as in our own rules. The sign of a NaN that arithmetic makes is the
hardware's; here it is x's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import format, scale_search
from .format import NAN_SCALE, blocks_of_32, dequant, nearest_codes, pack_codes, scale_bytes, scale_values

_CODE_VALUES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 1 to 7


@dataclass(frozen=True)
class QuantMode:
    """One quantizer, column by column.

    byte: how the scale byte follows from the block's largest magnitude: a key of ``_BYTES``, or "mse".
    source: library, version and function.
    ties: where a value half-way between two codes goes: to the "even" code, "away" from zero, toward "zero", or
    "first": to the lowest code of least float32 |value - x|, which differs from "zero" where x is far above all values.
    sign: when bit 3 of a code is set, a key of ``_SIGNS``.
    byte0, byte255: what elements are multiplied by under these scale bytes. The format says 2^127 for byte 0; 0 and 1
    leave only signs. 255 is met where inf or nan are not "block".
    inf, nan: "block": it makes scale byte 255 and codes 0 of its block; "seen": it is the block's maximum; "skipped":
    the maximum is that of the other elements.
    nan_code: the code, without its sign, of an element that is NaN after scaling.
    native: number of the rule in the compiled kernels; the others run in plain torch on every device.
    note: what else a user must know.
    """

    byte: str
    source: str
    ties: str = "even"
    sign: str = "kept"
    byte0: float = 2.0**127
    byte255: float = 0.0
    inf: str = "block"
    nan: str = "block"
    nan_code: int = 7
    native: int | None = None
    note: str = ""


_NAN_NOTE = "The torch function of the same library lets NaN into the maximum; the kernel, followed here, does not."
_QUARK = QuantMode("even, at most 254", "amd-quark 0.13", inf="seen", nan="skipped")
_TORCHAO = QuantMode("", "torchao 0.18.0, mx_formats to_mx", byte0=2.0**126, inf="seen", nan="seen", nan_code=3)
_TRITON = QuantMode("", "triton_kernels downcast_to_mxfp", byte0=0.0, inf="seen", nan="skipped", note=_NAN_NOTE)
_NEW, _OLD = "triton_kernels at triton-lang/triton 018a674, ", "triton_kernels of Triton 3.5 (in vLLM 0.33.0), "

QUANT_MODES = {
    "even": QuantMode("even", "default of this package", native=0),
    "floor": QuantMode("floor", "OCP MX v1.0, section 6.3", native=1),
    "ceil": QuantMode("ceil", "this package", native=2),
    "rceil": QuantMode("rceil", "this package", native=3),
    "mse": QuantMode("mse", "this package, scale_search.py"),
    "quark": replace(
        _QUARK,
        source="amd-quark 0.13 qdq_mxfp4, vLLM 0.33.0 downcast_to_mxfp, AITER dynamic_mxfp4_quant",
        note="Quark's fake_quantize_mx is the same but for NaN, which there makes its whole block NaN.",
    ),
    "quark_triton": replace(_QUARK, ties="away", source="amd-quark 0.13, kernel.mx.triton EVEN", note=_NAN_NOTE),
    "compressed_tensors": QuantMode(
        "even", "compressed-tensors 0.20.1, MXFP4PackedCompressor", sign="x < 0",
        note="NaN, Inf and amax >= 1.75 * 2^127 are undefined there, and float16 flushes scales it cannot hold.",
    ),
    "torchao_floor": replace(_TORCHAO, byte="floor"),
    "torchao_ceil": replace(_TORCHAO, byte="ceil"),
    "torchao_even": replace(_TORCHAO, byte="even"),
    "torchao_rceil": replace(
        _TORCHAO, byte="ceil(log2(amax / 6))", sign="kept, + for NaN", byte0=1.0, byte255=math.nan,
    ),
    "triton_kernels": replace(_TRITON, byte="up(amax / 6)", source=_NEW + "ROUND_UP"),
    "triton_kernels_down": replace(_TRITON, byte="down(amax / 4)", source=_NEW + "ROUND_DOWN"),
    "triton_kernels_3_5": replace(_TRITON, byte="up(amax / 6)", ties="away", source=_OLD + "ROUND_UP"),
    "triton_kernels_3_5_down": replace(_TRITON, byte="down(amax / 6)", ties="away", source=_OLD + "ROUND_DOWN"),
    "flashinfer": QuantMode(
        "up(amax * (1/6))", "FlashInfer 0.6.18, mxfp4_quantize", sign="kept, + for NaN", byte0=1.0,
        inf="seen", nan="skipped",
        note="By formula, not run. The kernel multiplies by rcp.approx(6), good to 1 ulp; here 1/6 is rounded to "
        "nearest. With the float32 below it, amax one float32 above 6 * 2^j would take the lower byte.",
    ),
    "gguf": QuantMode(
        "floor(log2(amax))", "gguf 0.19.0, quants.MXFP4", "first", "x < 0 and code > 0", nan="seen", nan_code=0,
        note="Inf and 0 < amax < 2^-125 are undefined there. NaN makes scale byte 0. Bytes are in our nibble order.",
    ),
    "modelopt": QuantMode(
        "ceil(log2(amax / 6))", "nvidia-modelopt 0.47.0, MXFP4QTensor", "zero", "x <= 0",
        note="NaN and Inf are undefined there.",
    ),
}  # fmt: skip


def quant(x: Tensor, mode_name: str) -> tuple[Tensor, Tensor]:
    """Round x [..., n] to blocks [..., n/2] and scales [..., n/32], uint8, as that row of QUANT_MODES says."""
    mode = QUANT_MODES[mode_name]
    if mode.native is not None:
        return format.quant(x, mode_name)
    if mode.byte == "mse":
        return scale_search.quant(x)
    return _quant(blocks_of_32(x), mode)


def qdq(x: Tensor, mode_name: str) -> Tensor:
    """Round x [..., n] to what MXFP4 can hold, in x's dtype: ``dequant(*quant(x))`` bit for bit."""
    return dequant(*quant(x, mode_name), x.dtype)


def _quant(blocks: Tensor, mode: QuantMode) -> tuple[Tensor, Tensor]:
    """Quantize float32 blocks [..., n/32, 32] in the libraries' own order of operations."""
    size, nan, inf = blocks.abs(), torch.isnan(blocks), torch.isinf(blocks)
    scales = _BYTES[mode.byte](_maximum_of_numbers(size) if mode.nan == "skipped" else size.amax(-1))
    value = blocks * _inverse(scales, mode)[..., None]
    codes = _first_nearest(size, scales) if mode.ties == "first" else nearest_codes(value.abs(), mode.ties)
    codes = torch.where(torch.isnan(value), mode.nan_code, codes)
    codes = codes | (_SIGNS[mode.sign](blocks, value, codes).to(torch.uint8) << 3)
    bad = ((inf & (mode.inf == "block")) | (nan & (mode.nan == "block"))).any(-1)
    codes = torch.where(bad[..., None], 0, codes).to(torch.uint8)
    return pack_codes(codes), torch.where(bad, NAN_SCALE, scales).to(torch.uint8)


def _maximum_of_numbers(size: Tensor) -> Tensor:
    """The largest magnitude that is not NaN; NaN where there is no other."""
    nan = torch.isnan(size)
    return torch.where(nan.all(-1), torch.nan, torch.where(nan, 0.0, size).amax(-1))


def _inverse(scales: Tensor, mode: QuantMode) -> Tensor:
    """What elements are multiplied by: 2^(127 - byte), and what the mode says for bytes 0 and 255."""
    inverse = scale_values((254 - scales.to(torch.int32)).clamp_min(0).to(torch.uint8))
    return torch.where(scales == 0, mode.byte0, torch.where(scales == NAN_SCALE, mode.byte255, inverse))


def _first_nearest(size: Tensor, scales: Tensor) -> Tensor:
    """Codes of magnitudes by the least float32 |value - size|, of equal ones the lowest code; NaN takes code 0."""
    step = scale_values(scales)[..., None]
    codes, least = torch.zeros_like(size, dtype=torch.uint8), size
    for code, value in enumerate(_CODE_VALUES, start=1):
        error = (value * step - size).abs()
        codes = torch.where(error < least, code, codes).to(torch.uint8)
        least = torch.where(error < least, error, least)
    return codes


_SIGNS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # of x, of x after scaling, of its code
    "kept": lambda x, value, code: torch.signbit(x),
    "kept, + for NaN": lambda x, value, code: torch.signbit(x) & ~torch.isnan(value),
    "x < 0": lambda x, value, code: x < 0,
    "x <= 0": lambda x, value, code: x <= 0,
    "x < 0 and code > 0": lambda x, value, code: (x < 0) & (code > 0),
}


def _sixth(amax: Tensor) -> Tensor:
    """amax / 6, correctly rounded on every device: by a Python number, CUDA would multiply with its reciprocal."""
    return amax / amax.new_full((), 6.0)


def _log2(value: Tensor) -> Tensor:
    """log2 as float32 has it: next to 2^k, and the more the greater |k|, it is k. By float64, alike on every device."""
    return value.double().log2().float()


def _exponent_field(value: Tensor, add: int = 0) -> Tensor:
    """Exponent field of float32 values to whose bits ``add`` was added, as 32-bit integers do."""
    return ((value.view(torch.int32) + add) >> 23) & 255


def _nan_or(amax: Tensor, byte: Tensor) -> Tensor:
    return torch.where(torch.isnan(amax), NAN_SCALE, byte)


def _even_at_most_254(amax: Tensor) -> Tensor:
    """The library takes log2 of the rounded maximum and clamps: what rounds up to Inf, and Inf, becomes 2^127."""
    byte = scale_bytes(amax, "even")
    return torch.where(byte >= 253, 254, byte)


def _up_by_reciprocal(amax: Tensor) -> Tensor:
    """cvt.rp.satfinite.ue8m0: the least power of two that is not below, Inf as 2^127."""
    quotient = amax * (1 / 6)
    up = _exponent_field(quotient, 0x7FFFFF).clamp_max(254)
    return _nan_or(amax, torch.where(quotient <= 2.0**-127, 0, up))


_BYTES: dict[str, Callable[[Tensor], Tensor]] = {  # float32 maxima of blocks, >= 0, Inf or NaN -> bytes as integers
    "even": lambda amax: _nan_or(amax, scale_bytes(amax, "even")),
    "floor": lambda amax: _nan_or(amax, scale_bytes(amax, "floor")),
    "ceil": lambda amax: _nan_or(amax, scale_bytes(amax, "ceil")),
    "even, at most 254": _even_at_most_254,
    "up(amax / 6)": lambda amax: _exponent_field(_sixth(amax), 0x7FFFFF),
    "down(amax / 6)": lambda amax: _exponent_field(_sixth(amax)),
    "down(amax / 4)": lambda amax: _exponent_field(amax * 0.25),
    "up(amax * (1/6))": _up_by_reciprocal,
    "ceil(log2(amax / 6))": lambda amax: _nan_or(amax, _log2(_sixth(amax)).ceil().clamp(-127, 127).nan_to_num() + 127),
    "floor(log2(amax))": lambda amax: (_log2(amax).floor() + 125).clamp(0, 254).nan_to_num(),
}
