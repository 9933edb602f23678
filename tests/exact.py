"""MXFP4 and IEEE 754 by fractions and integers, from the text of the standards: what the tests of numbers compare with.

Nothing here comes from the package, and nothing rounds by itself. Two forms of each rule: fractions, to be read, and
int64 arrays, for exhaustive tests; ``test_format.py`` compares the two.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import torch

RULES = ("even", "floor", "ceil", "rceil")
BLOCK = 32
# IEEE 754 binary formats: bits of the stored mantissa, exponent of the least and of the largest normal numbers.
FORMATS = {torch.float32: (23, -126, 127), torch.bfloat16: (7, -126, 127), torch.float16: (10, -14, 15)}
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

Array = np.ndarray[Any, Any]


def magnitude(code: int) -> Fraction:
    """E2M1 without the sign: two exponent bits with bias 1, one mantissa bit, exponent 0 is subnormal (OCP MX v1.0)."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    return Fraction(mantissa, 2) if exponent == 0 else (1 + Fraction(mantissa, 2)) * Fraction(2) ** (exponent - 1)


def value(code: int, byte: int) -> Fraction:
    """A code at an E8M0 scale byte below 255. The sign of zero is lost: see bit 3 of the code."""
    return magnitude(code) * (-1 if code & 8 else 1) * Fraction(2) ** (byte - 127)


def exponent_of(size: Fraction) -> int:
    """e with 2^e <= size < 2^(e+1); size > 0."""
    e = size.numerator.bit_length() - size.denominator.bit_length()
    return e if Fraction(2) ** e <= size else e - 1


def encode(size: Fraction, negative: bool, dtype: torch.dtype) -> int:
    """The bits of the nearest number of an IEEE format, ties to even, subnormals kept, overflow to Inf."""
    mantissa, least, largest = FORMATS[dtype]
    bits = 0
    if size:
        step = Fraction(2) ** (max(exponent_of(size), least) - mantissa)
        units = round(size / step)  # Python rounds halves to even
        # Units of the least normal's step are the bits of subnormals; each doubling of the step adds 2^mantissa.
        bits = units + ((max(exponent_of(size), least) - least) << mantissa)
        bits = min(bits, (largest - least + 2) << mantissa)
    width = 32 if dtype is torch.float32 else 16
    return bits | (int(negative) << (width - 1))


def decode(bits: int, dtype: torch.dtype) -> Fraction:
    """The value of a finite IEEE number's bits."""
    mantissa, least, _ = FORMATS[dtype]
    exponent, fraction = bits >> mantissa, bits & ((1 << mantissa) - 1)
    exponent &= 0xFF if dtype is not torch.float16 else 0x1F
    sign = -1 if bits >> (31 if dtype is torch.float32 else 15) & 1 else 1
    units = fraction if exponent == 0 else fraction + (1 << mantissa)
    return sign * units * Fraction(2) ** (max(exponent, 1) - 1 + least - mantissa)


def scale_byte(amax: Fraction, rule: str) -> int:
    """The rules of docs/format.md, by comparison of fractions with powers of two."""
    if amax == 0:
        return 0
    e = exponent_of(amax)
    f = amax / Fraction(2) ** e  # in [1, 2)
    up = {"floor": False, "ceil": f > 1, "even": f >= Fraction(7, 4), "rceil": f > Fraction(3, 2)}[rule]
    return max(e - 2 + up + 127, 0)


def code(size: Fraction, negative: bool, byte: int) -> int:
    """Nearest magnitude at a scale byte; of two at the same distance the one with the even code."""
    scaled = size / Fraction(2) ** (byte - 127)
    return min(range(8), key=lambda c: (abs(magnitude(c) - scaled), c % 2)) | (8 if negative else 0)


def quant_block(x: list[float], rule: str) -> tuple[list[int], int]:
    """Codes and scale byte of one block of floats."""
    if not all(map(math.isfinite, x)):
        return [0] * len(x), 255
    byte = scale_byte(max(abs(Fraction(v)) for v in x), rule)
    return [code(abs(Fraction(v)), math.copysign(1, v) < 0, byte) for v in x], byte


def float32_bits(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def quant_array(x: Array, rule: str) -> tuple[Array, Array]:
    """``quant_block`` of float32 [..., 32]: codes [..., 32] and scale bytes [...], by int64 alone.

    |x| is m * 2^p with m < 2^24. Exponents and comparisons are those of integers; no float is added or multiplied.
    """
    bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
    field, fraction = (bits >> 23) & 255, bits & 0x7FFFFF
    finite = (field < 255).all(-1)
    m, p = np.where(field > 0, fraction + 0x800000, fraction), np.maximum(field, 1) - 150
    amax = (bits & 0x7FFFFFFF).max(-1)
    byte = np.where(finite, _scale_bytes(amax, rule), 255)
    # The scaled magnitude is m / 2^shift; it is below 8, so that shift > 20. 2^40 is more than any m.
    shift = np.clip(byte[..., None] - 127 - p, 0, 40)
    quarters = [int(magnitude(c) * 2 + magnitude(c + 1) * 2) for c in range(7)]  # midpoints, times 4
    codes = np.zeros_like(m)
    for c, quarter in enumerate(quarters):
        # A tie goes to the even one of the codes c and c + 1.
        codes += (4 * m >= quarter << shift) if c % 2 else (4 * m > quarter << shift)
    codes |= (bits >> 31) << 3
    return np.where(finite[..., None], codes, 0).astype(np.uint8), byte.astype(np.uint8)


def _scale_bytes(amax: Array, rule: str) -> Array:
    """Scale bytes of magnitudes given as the bits of float32: m of a normal number has 24 bits, 2^23 being f = 1."""
    field, m = amax >> 23, (amax & 0x7FFFFF) + (1 << 23)
    one = 1 << 23
    up = {"floor": m < 0, "ceil": m > one, "even": 4 * m >= 7 * one, "rceil": 2 * m > 3 * one}[rule]
    return np.where(field > 0, np.maximum(field - 2 + up, 0), 0)  # subnormals are below 2^-126: byte 0 by every rule


def pack(codes: Array) -> Array:
    """Two codes a byte, the even element in the low nibble."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
