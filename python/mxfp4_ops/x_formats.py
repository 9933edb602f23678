"""How x enters the products: every ``x_format`` in plain torch, the definition that kernels are tested against.

"none" takes each element of x at its own precision. Every other form rounds x before the first product, and the
activation's float32 result before the second, by the same function. Scales come from integer bits or from one IEEE
division, so that every device gets the same bytes. A group that holds NaN or Inf becomes NaN as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import format
from .format import BLOCK, NAN_SCALE, scale_values

_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0  # 1.75 * 2^8
_SMALLEST = 2.0**-126  # the least scale: its inverse is finite, and both are normal numbers
_INT8_MAX, _INT15_MAX = 127, 127 * 256
_ROW = 0  # in place of a group's size: one group a row


@dataclass(frozen=True)
class XFormat:
    """One row of the table: what a group of ``group`` elements becomes, and back.

    ``quantize`` takes float32 groups [..., g] and returns planes [..., p, g] and scales [...]; ``dequantize`` is its
    inverse, to float32. ``x_dtypes`` and ``scale_dtypes`` are what a caller may pass as x and x_scale, first the one
    that ``quant_x`` returns; empty where x cannot come quantized.
    """

    group: int
    text: str
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    dequantize: Callable[[Tensor, Tensor], Tensor]
    x_dtypes: tuple[torch.dtype, ...] = ()
    scale_dtypes: tuple[torch.dtype, ...] = ()

    def scales_of(self, size: int) -> int:
        """How many scales a row of ``size`` elements has."""
        return -(-size // self.group) if self.group else 1


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude of each group; Inf for a group that holds NaN or Inf."""
    finite = torch.isfinite(x).all(-1)
    return torch.where(finite, x.abs().amax(-1), torch.inf)


def _divided(amax: Tensor, top: float) -> Tensor:
    """amax / top, which the largest element divides to ``top``; 1 for a group of zeros, NaN for a bad one.

    By a tensor: on a GPU torch divides by a Python number with its reciprocal, which rounds otherwise.
    """
    scale = torch.where(amax == 0, 1.0, (amax / amax.new_full((), top)).clamp_min(_SMALLEST))
    return torch.where(amax == torch.inf, torch.nan, scale)


def _exponent_field(amax: Tensor) -> Tensor:
    """The exponent field of the least power of two s with amax <= 448 s, by integer bits; below 1 for tiny groups."""
    bits = amax.view(torch.int32)
    return (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)


def _power_of_two(amax: Tensor) -> Tensor:
    """The least power of two s with amax <= 448 s; 1 for a group of zeros, NaN for a bad one."""
    scale = (_exponent_field(amax).clamp_min(1) << 23).view(torch.float32)
    return torch.where(amax == torch.inf, torch.nan, torch.where(amax == 0, 1.0, scale))


def _to_e4m3(x: Tensor) -> Tensor:
    """Round float32 to float8_e4m3fn: nearest, ties to even, saturating at 448, NaN for NaN."""
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(_E4M3)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale; 0 in a bad group, whose scale says it all."""
    return torch.where(torch.isfinite(scale)[..., None], x / scale[..., None], 0.0)


def _quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _divided(_amax(x), _INT8_MAX)
    q = _scaled(x, scale).round().clamp(-_INT8_MAX, _INT8_MAX)
    return q.to(torch.int8)[..., None, :], scale


def _quantize_int15(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _divided(_amax(x), _INT15_MAX)
    q = _scaled(x, scale).round().clamp(-_INT15_MAX, _INT15_MAX).to(torch.int32)
    high = (q + 128) >> 8  # low = q - 256 high is in -128..127
    return torch.stack((high, q - (high << 8)), -2).to(torch.int8), scale


def _dequantize_int15(planes: Tensor, scale: Tensor) -> Tensor:
    high, low = planes.to(torch.int32).unbind(-2)
    return (high * 256 + low).to(torch.float32) * scale[..., None]


def _quantize_fp8(scale_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = scale_of(_amax(x))
        return _to_e4m3(_scaled(x, scale))[..., None, :], scale

    return quantize


def _quantize_fp8x2(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _power_of_two(_amax(x))
    value = _scaled(x, scale)
    high = _to_e4m3(value)
    low = _to_e4m3(16 * (value - high.to(torch.float32)))
    return torch.stack((high, low), -2), scale


def _dequantize_fp8x2(planes: Tensor, scale: Tensor) -> Tensor:
    high, low = planes.to(torch.float32).unbind(-2)
    return (high + low / 16) * scale[..., None]


def _quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    amax = _amax(x)
    byte = torch.where(amax == torch.inf, NAN_SCALE, _exponent_field(amax).clamp_min(0)).to(torch.uint8)
    inverse = ((2 * 127 - byte.to(torch.int32)).clamp_min(1) << 23).view(torch.float32)
    value = torch.where((byte == NAN_SCALE)[..., None], 0.0, x * inverse[..., None])
    return _to_e4m3(value)[..., None, :], byte


def _quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks, scales = format.quant(x, "even")
    return blocks[..., None, :], scales[..., 0]


def _dequantize_mxfp4(planes: Tensor, scale: Tensor) -> Tensor:
    return format.dequant(planes[..., 0, :], scale[..., None], torch.float32)


def _dequantize_plane(planes: Tensor, scale: Tensor) -> Tensor:
    return planes[..., 0, :].to(torch.float32) * scale[..., None]


def _dequantize_mxfp8(planes: Tensor, scale: Tensor) -> Tensor:
    return _dequantize_plane(planes, scale_values(scale))


_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
FORMS: dict[str, XFormat] = {
    "fp8x2": XFormat(
        _ROW,
        "two e4m3: x/s = hi + lo/16, s the least power of two with amax <= 448 s",
        _quantize_fp8x2,
        _dequantize_fp8x2,
    ),
    "int15": XFormat(BLOCK, "two int8: round(x/s) = 256 hi + lo, s = amax / 32512", _quantize_int15, _dequantize_int15),
    "int8": XFormat(
        BLOCK,
        "int8: round(x/s), s = amax / 127",
        _quantize_int8,
        _dequantize_plane,
        (torch.int8,),
        (torch.float32,),
    ),
    "fp8": XFormat(
        128,
        "e4m3: x/s, s the least power of two with amax <= 448 s (DeepGEMM)",
        _quantize_fp8(_power_of_two),
        _dequantize_plane,
        (_E4M3,),
        (torch.float32,),
    ),
    "fp8_row": XFormat(
        _ROW,
        "e4m3: x/s, s = amax / 448",
        _quantize_fp8(lambda amax: _divided(amax, _E4M3_MAX)),
        _dequantize_plane,
        (_E4M3,),
        (torch.float32,),
    ),
    "mxfp8": XFormat(
        BLOCK,
        "e4m3: x/s, s an E8M0 byte, the least power of two with amax <= 448 s (FlashInfer)",
        _quantize_mxfp8,
        _dequantize_mxfp8,
        (_E4M3,),
        _E8M0,
    ),
    "mxfp4": XFormat(
        BLOCK,
        "MXFP4 by scale rule even: quant(x)",
        _quantize_mxfp4,
        _dequantize_mxfp4,
        (torch.uint8, torch.float4_e2m1fn_x2),
        _E8M0,
    ),
}
# Every value of the argument. "fp8_static" is no form of x alone: e4m3 of x/s, where s belongs to the expert.
X_FORMATS = ("none", *FORMS, "fp8_static")
# The two float32 [E] tensors that "fp8_static" finds in aux, after the layout's own: the scale of x and of the
# activation's result for each expert. The names are those of quark and compressed-tensors checkpoints.
INPUT_SCALES = ("w13_input_scale", "w2_input_scale")


def quantize(x: Tensor, form: XFormat) -> tuple[Tensor, Tensor]:
    """Round float32 rows [R, n]: planes [R, G, p, g] and scales [R, G]; a last group that is short is filled with
    zeros."""
    size = x.shape[-1]
    groups = form.scales_of(size)
    width = form.group or size
    padded = torch.nn.functional.pad(x, (0, groups * width - size))
    return form.quantize(padded.unflatten(-1, (groups, width)))


def round_x(x: Tensor, x_format: str) -> Tensor:
    """What float32 rows [R, n] become in the products: quantized and expanded again, float32."""
    form = FORMS[x_format]
    return form.dequantize(*quantize(x, form)).flatten(-2)[..., : x.shape[-1]]


def round_static(x: Tensor, scale: Tensor) -> Tensor:
    """ "fp8_static": float32 rows [R, n] by a scale that was measured beforehand, a float32 scalar."""
    return _to_e4m3(x / scale).to(torch.float32) * scale


def expand_x(x: Tensor, x_scale: Tensor, x_format: str, size: int) -> Tensor:
    """Expand x that came quantized, [T, n] (mxfp4 [T, n/2]) with x_scale [T, G], to float32 [T, size]."""
    if x_format == "mxfp4":
        return format.dequant(format.as_bytes(x), format.as_bytes(x_scale), torch.float32)
    scales = x_scale if x_scale.dtype is torch.float32 else scale_values(format.as_bytes(x_scale))
    width = FORMS[x_format].group or size
    return x.to(torch.float32) * scales.repeat_interleave(width, -1)[:, :size]
