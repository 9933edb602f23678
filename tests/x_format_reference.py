"""Every x_format a second time, in numpy and exact arithmetic, from the words of docs/format.md: no code of the package
is used, so that a mistake shared by definition and kernel would show."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

GROUPS = {"fp8x2": 0, "int15": 32, "int8": 32, "fp8": 128, "fp8_row": 0, "mxfp8": 32, "mxfp4": 32}


def e4m3_values() -> list[float]:
    """The non-negative values of E4M3 (bias 7) in order of their codes 0 to 126; code 127 is NaN."""
    return [
        math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    ]


E4M3 = np.array(e4m3_values())


def nearest(value: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Round float64 to a grid of magnitudes: the nearest, a tie to the even code, saturating."""
    magnitude = np.minimum(np.abs(value), grid[-1])
    above = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    up = (high - magnitude < magnitude - low) | ((high - magnitude == magnitude - low) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), value)


def power_of_two(amax: float, lowest: int) -> float:
    """The least power of two s with amax <= 448 s, not below 2^lowest."""
    k = lowest
    while amax > math.ldexp(448.0, k):
        k += 1
    return math.ldexp(1.0, k)


def divided(amax: float, top: float) -> np.float32:
    if amax == 0:
        return np.float32(1)
    return max(np.float32(amax) / np.float32(top), np.float32(2.0**-126))


def round_group(x: np.ndarray, x_format: str) -> np.ndarray:
    """One group of float32 as float64 values of what it becomes."""
    if not np.isfinite(x).all():
        return np.full(len(x), np.nan)
    amax = float(np.abs(x).max())
    wide = x.astype(np.float64)
    if x_format in ("int8", "int15"):
        top = 127 if x_format == "int8" else 32512
        scale = divided(amax, top)
        return np.clip(np.rint((x / scale).astype(np.float64)), -top, top) * float(scale)
    if x_format == "fp8_row":
        scale = divided(amax, 448.0)
        return nearest((x / scale).astype(np.float64), E4M3) * float(scale)
    if x_format == "mxfp4":
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
        mantissa, exponent = math.frexp(amax)  # amax = (2 mantissa) 2^(exponent - 1)
        step = math.ldexp(1.0, max(exponent - 1 - 2 + (2 * mantissa >= 1.75), -127)) if amax else 2.0**-127
        return nearest(wide / step, grid) * step
    scale = power_of_two(amax, -127 if x_format == "mxfp8" else -126)
    if x_format == "fp8x2":
        high = nearest(wide / scale, E4M3)
        low = nearest(16 * (wide / scale - high), E4M3)
        return (high + low / 16) * scale
    return nearest(wide / scale, E4M3) * scale


def round_rows(x: Tensor, x_format: str) -> Tensor:
    """float32 rows [R, n] as float64 [R, n]; "none" changes nothing."""
    if x_format == "none":
        return x.double()
    rows = x.cpu().float().numpy()
    width = GROUPS[x_format] or rows.shape[1]
    out = np.empty(rows.shape)
    for r, row in enumerate(rows):
        for start in range(0, rows.shape[1], width):
            out[r, start : start + width] = round_group(row[start : start + width], x_format)
    return torch.from_numpy(out)


def round_static(x: Tensor, scale: float) -> Tensor:
    with np.errstate(over="ignore"):  # to Inf, which saturates
        quotient = (x.cpu().float().numpy() / np.float32(scale)).astype(np.float64)
    return torch.from_numpy(nearest(quotient, E4M3) * scale)
