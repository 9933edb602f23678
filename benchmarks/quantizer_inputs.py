"""Blocks on which quantizers are compared: random, every tie, and every corner where one may differ from another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
LARGEST = torch.finfo(torch.float32).max


def block(*values: float) -> Tensor:
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


def random_blocks() -> Tensor:
    g = torch.Generator().manual_seed(7)
    scales = [2.0**e for e in (-140, -126, -120, -60, -3, 0, 2, 60, 120, 125)]
    return torch.cat([torch.randn(200, 32, generator=g) * s for s in scales])


def tie_blocks() -> Tensor:
    """Every tie and its two float32 and bfloat16 neighbours, at every scale, beside 6 or 4 of that scale."""
    down, up = torch.nextafter(TIES, TIES * 0), torch.nextafter(TIES, TIES * 2)
    coarse = torch.cat([TIES * (1 - 2**-7), TIES * (1 + 2**-7)])
    rows = []
    for e in range(-126, 126):
        for values in (TIES, down, up, coarse[:7], coarse[7:]):
            for top in (6.0, 4.0):
                rows.append(torch.cat([values, -values, torch.tensor([top, -0.0, 0.0])]) * 2.0**e)
    padded = torch.zeros(len(rows), 32)
    padded[:, :17] = torch.stack(rows)
    return padded


def boundary_blocks() -> Tensor:
    """Maxima around 2^k, 1.5 * 2^k and 1.75 * 2^k, by up to 48 steps of float32: where scale rules change."""
    rows = []
    for exponent in range(256):
        for mantissa in (0, 0x400000, 0x600000):
            first = (exponent << 23) + mantissa
            bits = torch.arange(first - 48, first + 49).clamp(0, 0x7F7FFFFF).to(torch.int32)
            rows.append(bits.view(torch.float32))
    maxima = torch.cat(rows)[:, None]
    return torch.cat([maxima, -maxima * 0.3, maxima * 0.2, torch.zeros(len(maxima), 29)], 1)


def corner_blocks() -> dict[str, Tensor]:
    tiny = [2.0**e for e in (-149, -148, -147, -128, -127, -126, -125, -124)]
    tiny = [v * f for v in tiny for f in (1.0, 1.25, 1.5, 1.75)] + [3 * 2.0**-149, 5 * 2.0**-149]
    huge = [2.0**127, 1.5 * 2.0**127, 1.625 * 2.0**127, 1.75 * 2.0**127, LARGEST]
    nan, inf = math.nan, math.inf
    beside = block(nan, 2.0**-126, -(2.0**-120), 1e-33)
    return {
        "zeros": torch.stack([torch.zeros(32), -torch.zeros(32), block(0.0, -0.0, 0.0, -0.0)]),
        "signs": torch.stack([block(1.0, -1.0, -0.0, -0.01, 0.01, -0.3), block(6.0, -0.0, 2**-140, -(2**-140))]),
        "tiny": torch.stack([block(v, -v / 2, v / 4, -0.0, 2.0**-149, -(2.0**-149)) for v in tiny]),
        "huge": torch.stack([block(v, -v / 2, v / 3, -0.0, 1.0, -v) for v in huge]),
        "NaN": torch.stack(
            [block(nan, 1, -3, -0.0, 0.3), block(nan), torch.full((32,), nan), beside]
        ),
        "Inf": torch.stack([block(inf, 1, -3, -0.0, 3e38), block(-inf, 2.0), block(inf, nan, -2.0, 3e38)]),
    }  # fmt: skip


def held_in(dtype: torch.dtype, x: Tensor) -> Tensor:
    """x in ``dtype`` with the usual NaN, 0x7FC0: torch's conversion makes another, and torchao's code shows which."""
    return torch.where(x.isnan(), torch.tensor(math.nan, dtype=dtype), x.to(dtype))


def groups(dtype: torch.dtype) -> dict[str, Tensor]:
    """All blocks by kind, in ``dtype``; float32 alone has the steps around boundaries."""
    found = {"random": random_blocks(), "ties": tie_blocks(), **corner_blocks()}
    if dtype is torch.float32:
        found["boundaries"] = boundary_blocks()
    return {name: held_in(dtype, x) for name, x in found.items()}


def golden_blocks() -> Tensor:
    """Few blocks that tell every mode from every other: what the golden table holds. Most are exact in bfloat16."""
    ties = torch.cat([TIES, -TIES, torch.tensor([6.0, -0.0, 0.0, -0.1, 0.1])])
    rows = [block(*(ties * 2.0**e).tolist()) for e in (0, -40, 70)]
    rows += [block(top, 1.0, -2.0) for top in (4.0, 5.0, 6.0, 6.5, 7.0, 7.5, 8.0)]
    corners = corner_blocks()
    rows += [*corners["zeros"], *corners["signs"], *corners["tiny"][::3]]
    rows += [*corners["huge"], *corners["NaN"], *corners["Inf"]]
    g = torch.Generator().manual_seed(11)
    coarse = torch.cat([torch.stack(rows), torch.randn(6, 32, generator=g)]).bfloat16().float()
    # One float32 step from where rules change, and steps within which a float32 log2 is still a whole number.
    near = [1.5, 1.75, 1.5 * 2.0**100, 1.5 * 2.0**-100, 2.0**-100, 2.0**100, 2.0**-124]
    steps = [1, -1, 4, 30, 20, -10, -1]
    moved = (torch.tensor(near).view(torch.int32) + torch.tensor(steps, dtype=torch.int32)).view(torch.float32)
    x = torch.cat([coarse, torch.stack([block(float(v)) for v in moved])])
    return held_in(torch.float32, x)
