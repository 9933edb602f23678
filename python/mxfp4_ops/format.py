"""The number format in plain torch: this file is the definition that every kernel is tested against.

MXFP4 (OCP Microscaling Formats v1.0): 32 elements share one scale. An element is E2M1 (sign, two exponent bits, one
mantissa bit; bias 1; no Inf, no NaN); two elements lie in a byte, the even one in the low nibble. The scale byte b is
E8M0: 2^(b-127) for 0..254, NaN for 255. The scale rules and the treatment of zero, NaN and Inf, which the standard
leaves open, are written in ``docs/format.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import need

BLOCK = 32  # elements that share one scale byte
NAN_SCALE = 255  # the scale byte that makes its whole block NaN
NEUTRAL_SCALE = 127  # 2^0: what padding is filled with

# A magnitude lies at code c when it is above c of these bounds. The upper neighbours of 0.75, 1.75 and 3.5 are the even
# codes 2, 4 and 6.
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Whether a value on the bound takes the upper code. "zero" and "away" (from zero) are ties of other libraries.
TIES_GO_UP = {
    "even": (False, True, False, True, False, True, False),
    "away": (True,) * len(_BOUNDS),
    "zero": (False,) * len(_BOUNDS),
}

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # their places are the codes of the native kernels

_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_EMAX = 2  # exponent of the largest element, 6 = 1.5 * 2^2


def scale_bytes(amax: Tensor, scale_rule: str) -> Tensor:
    """Choose the scale byte of each block from its largest magnitude, by integer bits alone (no log2).

    Shapes: amax [...] float32, finite and >= 0 (what Inf and NaN give is 253 or 254 and means nothing). Returns [...]
    uint8.
    With E the exponent field and f the mantissa field of amax, the byte is max(E - 2 + up, 0), where up is
    ``floor`` 0; ``even`` 1 when amax >= 1.75 * 2^e; ``ceil`` 1 when f != 0; ``rceil`` 1 when amax > 1.5 * 2^e, which
    is the least scale that does not saturate.
    Source: OCP MX v1.0 section 6.3 (floor); the others as quark, torchao and FlashInfer define them.
    """
    bits = amax.view(torch.int32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & _MANTISSA
    bound = {"even": 0x5FFFFF, "floor": _MANTISSA, "ceil": 0, "rceil": 0x400000}[scale_rule]
    return (exponent - _EMAX + (mantissa > bound).to(torch.int32)).clamp_min(0).to(torch.uint8)


def scale_values(scales: Tensor) -> Tensor:
    """Expand E8M0 bytes [...] uint8 to float32 [...], exactly: byte 0 is 2^-127 (a subnormal), byte 255 is NaN."""
    wide = scales.to(torch.int32)
    special = (wide == 0) | (
        wide == NAN_SCALE
    )  # the mantissa's top bit makes 2^-127 of the first and NaN of the second
    return ((wide << _MANTISSA_BITS) | torch.where(special, 0x400000, 0).to(torch.int32)).view(torch.float32)


def blocks_of_32(x: Tensor) -> Tensor:
    """View x [..., n] as blocks [..., n/32, 32] in float32, which holds every value of the accepted dtypes."""
    return x.to(torch.float32).unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))


def nearest_codes(magnitude: Tensor, ties: str = "even") -> Tensor:
    """Codes 0 to 7 (uint8) of the values nearest to float32 magnitudes, saturating at 6; NaN takes code 0."""
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for bound, goes_up in zip(_BOUNDS, TIES_GO_UP[ties], strict=True):
        codes = codes + (magnitude >= bound if goes_up else magnitude > bound).to(torch.uint8)
    return codes


def pack_codes(codes: Tensor) -> Tensor:
    """Lay one code a byte, [..., n/32, 32] uint8, two in a byte: [..., n/2], the even element in the low nibble."""
    codes = codes.flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def encode(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Round float32 blocks [..., n/32, 32] with given scale bytes, at most 253, to the nearest codes, ties to even.

    A block that holds NaN or Inf gets scale byte 255 and codes 0. Returns what ``quant`` returns.
    """
    finite = torch.isfinite(blocks).all(-1)
    # 2^(127-b): exact, since a byte of a finite block is at most 253 and 2^127 and 2^-126 are both normal numbers.
    inverse = ((2 * 127 - scales.to(torch.int32)).clamp_min(1) << _MANTISSA_BITS).view(torch.float32)
    value = torch.where(finite[..., None], blocks * inverse[..., None], 0.0)
    codes = nearest_codes(value.abs()) | (torch.signbit(value).to(torch.uint8) << 3)
    return pack_codes(codes), torch.where(finite, scales, NAN_SCALE).to(torch.uint8)


def quant(x: Tensor, scale_rule: str) -> tuple[Tensor, Tensor]:
    """Round x [..., n] to MXFP4: blocks [..., n/2] uint8 and scales [..., n/32] uint8.

    Elements go to the nearest value, ties to the even code, saturating at 6; the sign of zero is kept. A block that
    holds NaN or Inf gets scale byte 255 and codes 0; a block of zeros gets scale byte 0.
    """
    blocks = blocks_of_32(x)
    return encode(blocks, scale_bytes(blocks.abs().amax(-1), scale_rule))


def codes_of(blocks: Tensor) -> Tensor:
    """Spread blocks [..., n/2] uint8 to one code a byte, [..., n] uint8, low nibble first."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)


def code_values(codes: Tensor) -> Tensor:
    """float32 values of E2M1 codes, by moving their bits: a CUDA graph could not copy a table from the host."""
    wide = codes.to(torch.int32)
    magnitude = wide & 7
    # Codes 2 to 7 are normal: exponent (m >> 1) - 1, mantissa bit m & 1. Code 1 is the subnormal 2^-1, code 0 is zero.
    normal = (((magnitude >> 1) + 126) << _MANTISSA_BITS) | ((magnitude & 1) << (_MANTISSA_BITS - 1))
    bits = torch.where(magnitude >= 2, normal, magnitude * (126 << _MANTISSA_BITS))
    return (bits | ((wide & 8) << 28)).view(torch.float32)


def dequant(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Expand blocks [..., n/2] and scales [..., n/32], both uint8, to [..., n] of ``dtype``.

    Exact in float32 and bfloat16 wherever the type holds the value (2^128 and more is Inf); float16 rounds once,
    to nearest even, from the exact value.
    """
    values = code_values(codes_of(blocks))
    values = values.unflatten(-1, (scales.shape[-1], BLOCK)) * scale_values(scales)[..., None]
    return values.flatten(-2).to(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """View a float8_e8m0fnu or float4_e2m1fn_x2 tensor as the bytes it is; uint8 passes through. Never converts
    values."""
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


def need_blocks(op: str, name: str, size: int) -> None:
    """Refuse a size in elements that is not a positive multiple of 32."""
    need(
        bool(size > 0) and bool(size % BLOCK == 0),
        lambda: f"{op}: {name} must be a positive multiple of {BLOCK}, got {size}.",
    )
