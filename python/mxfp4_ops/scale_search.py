"""The scale that rounds a block with the least error: scale rule "mse", in plain torch.

The error of a block is the sum of (x - value)^2 over its 32 elements, values being the nearest that a scale offers.
Two scale bytes per block suffice. Let s = 2^(b-127) be the least scale with amax <= 6 s, which rule "rceil" chooses.

1. No greater scale is better. The values of 2 s up to 6 s are 0, 1, 2, 3, 4 and 6 times s: all of them are values of s,
   and 8 s is further from every |x| <= 6 s than 6 s is. So each element is rounded at s at least as well as at 2 s,
   and by the same argument at 2 s as at 4 s.
2. Nothing below s/2 is better. Let t be s/2 or less, so amax > 3 s >= 6 t, and compare t with t/2. The maximum
   saturates at both: (amax - 3 t)^2 - (amax - 6 t)^2 = 3 t (2 amax - 9 t) > 9 t^2 is what t gains on it. Another
   element above 3 t has 3 t among the values of t and takes 3 t at t/2: t is at least as good. One up to 3 t is rounded
   at t with an error of t/2 at most, so t/2 gains at most t^2/4 on each, in all at most 31/4 t^2 < 9 t^2.

So b and b - 1 are compared, and of equal errors b wins, where nothing saturates. Source: own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import blocks_of_32, code_values, encode, nearest_codes, scale_bytes


def quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [..., n] with the least squared error per block: blocks [..., n/2] and scales [..., n/32], uint8.

    Elements, zeros, NaN and Inf as in ``format.quant``. Values that MXFP4 holds come back as they are.
    """
    blocks = blocks_of_32(x)
    scales = scale_bytes(blocks.abs().amax(-1), "rceil")
    return encode(blocks, scales - _lower_is_better(blocks.abs(), scales).to(torch.uint8))


def _lower_is_better(magnitude: Tensor, scales: Tensor) -> Tensor:
    """Whether scale byte b - 1 rounds magnitudes [..., n/32, 32] with less error than b in ``scales`` [..., n/32].

    Exact, so the same on every device and in any order of summation. In units of the lower scale let an element be y,
    its value at b - 1 be v and at b be w. The errors differ by (y - v)^2 - (y - w)^2 = (w - v) (2 y - v - w), which is
    linear in y. It is 0 where v = w, and everywhere else y >= 0.25 is a multiple of 2^-25, v and w are multiples of
    0.5, and the size is below 2^8: 34 bits an element and 39 bits for 32 of them, which float64 holds.
    """
    lower = scales.to(torch.int32) - 1
    # 2^(127 - lower) for lower = 0..252, by its exponent field.
    inverse = ((254 - lower.clamp_min(0)) << 23).view(torch.float32)
    y = magnitude * inverse[..., None]
    v = code_values(nearest_codes(y)).double()
    w = code_values(nearest_codes(y * 0.5)).double() * 2
    difference = ((w - v) * (2 * y.double() - v - w)).sum(-1)
    return (difference < 0) & (lower >= 0)
