"""What ``mxfp4::route`` computes, in plain torch for any device, and its methods.

Every step is a rounded fp32 operation (+, -, *, /, sqrt) in a written order, the exponential and the logarithm
included, so that all devices and ``csrc/cpu/route.cpp`` give the same bits: scores that nearly tie are told apart in
the same way everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")  # places are the codes of Score in route.h


@dataclass(frozen=True)
class Method:
    """A score, and which arguments of ``route`` have a meaning with it. ``renormalize`` is the only value it takes."""

    score: str
    bias: bool = False
    groups: bool = False
    hash_table: bool = False
    renormalize: bool | None = None


METHODS = {
    "softmax_topk": Method("softmax", bias=True, groups=True),
    "topk_softmax": Method("softmax", renormalize=True),
    "sigmoid_topk": Method("sigmoid", bias=True, groups=True),
    "topk_sigmoid": Method("sigmoid", renormalize=False),
    "sqrtsoftplus_topk": Method("sqrtsoftplus", bias=True, hash_table=True),
}


def _exponential(x: Tensor) -> Tensor:
    """e^x within 2e-7, by the steps of ``exponential`` in ``csrc/cpu/activation.h``, which explains them."""
    magic = 12582912.0
    x = x.clamp(-105.0, 89.0)
    shifted = x * 1.44269504088896341 + magic
    n = shifted - magic
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = torch.full_like(r, 1.98412698e-4)
    for coefficient in (1.38888889e-3, 8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5):
        p = p * r + coefficient
    p = p * r * r + r + 1.0
    exponent = shifted.view(torch.int32) - 0x4B400000  # the bits of magic
    half = exponent >> 1
    low, high = (((e + 127) << 23).view(torch.float32) for e in (half, exponent - half))
    return p * low * high


def _log_one_plus(u: Tensor) -> Tensor:
    """log(1 + u) for 0 <= u <= 1, as 2 atanh(u / (2 + u))."""
    s = u / (u + 2.0)
    z = s * s
    p = torch.full_like(s, 1 / 15)
    for divisor in (13, 11, 9, 7, 5, 3):
        p = p * z + 1 / divisor
    return (p * z * s + s) * 2.0


def _sqrt(x: Tensor) -> Tensor:
    """Root rounded to nearest. By way of float64: torch's own in float32 may be an ulp off, where MKL computes it."""
    return x.double().sqrt().float()


def _sum_by_halves(x: Tensor) -> Tensor:
    """Sum of the last dimension, kept: the upper half is added to the lower one until one element is left."""
    n = 1 << (x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, n - x.shape[-1]))
    while n > 1:
        n //= 2
        x = x[..., :n] + x[..., n:]
    return x


def _sum_in_order(x: Tensor) -> Tensor:
    """Sum of the last dimension, kept, from the first element to the last."""
    total = x[..., :1]
    for k in range(1, x.shape[-1]):
        total = total + x[..., k : k + 1]
    return total


def _nonzero(divisor: Tensor) -> Tensor:
    """The divisor, or 1 for 0: what it divides is 0 there and stays so."""
    return torch.where(divisor == 0, 1.0, divisor)


def _scores(x: Tensor, score: str) -> tuple[Tensor, Tensor]:
    """Return numerators [T, E] and divisors [T, 1] of the scores."""
    if score == "softmax":
        largest = x.amax(-1, keepdim=True)
        values = _exponential(x - torch.where(largest == -torch.inf, 0.0, largest))
        return values, _sum_by_halves(values)
    if score == "sigmoid":
        values = 1.0 / (_exponential(-x) + 1.0)
    else:
        values = _sqrt(x.clamp(min=0.0) + _log_one_plus(_exponential(-x.abs())))
    return values, values.new_ones(len(values), 1)


def _numbers(x: Tensor) -> Tensor:
    """NaN becomes -Inf, and -0 becomes 0, which not every sort takes for its equal."""
    return torch.where(x.isnan(), -torch.inf, x) + 0.0


def _falling(x: Tensor) -> Tensor:
    """Indices that sort the last dimension from high to low; of equal values the lower index comes first."""
    return _numbers(x).sort(dim=-1, descending=True, stable=True).indices


def _best(choice: Tensor, top_k: int, groups: int, topk_groups: int, *, two: bool) -> Tensor:
    """Choose top_k of the experts in the best groups: [T, top_k] int64."""
    if groups == 1:
        return _falling(choice)[:, :top_k]
    size = choice.shape[1] // groups
    by_group = _numbers(choice).unflatten(1, (groups, size))
    group_scores = by_group.topk(2, dim=-1).values.sum(-1) if two else by_group.amax(-1)
    kept = _falling(group_scores)[:, :topk_groups].sort(dim=-1).values
    candidates = (kept[..., None] * size + torch.arange(size, device=choice.device)).flatten(1)
    return candidates.gather(1, _falling(choice.gather(1, candidates))[:, :top_k])


def route(
    logits: Tensor,
    bias: Tensor | None,
    given: Tensor | None,
    top_k: int,
    *,
    score: str,
    groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Choose experts and weigh them.

    Shapes: logits [T, E]; bias [E] float32, for the choice only; given [T, top_k] int32, experts chosen elsewhere, or
    -1, whose weight is 0. Returns ids int32 and weights float32, both [T, top_k].
    Without a bias the logits choose: scores grow with them, and rounding makes no ties.
    """
    x = logits.float()
    values, total = _scores(x, score)
    choice = x if bias is None else values / _nonzero(total) + bias
    ids = _best(choice, top_k, groups, topk_groups, two=bias is not None) if given is None else given.long()
    chosen = values.gather(1, ids.clamp(min=0))
    chosen = torch.where(ids < 0, 0.0, chosen)
    weights = chosen / _nonzero(_sum_in_order(chosen) if renormalize else total) * scale
    if given is None:
        weights = torch.where(choice.isnan().any(-1, keepdim=True), torch.nan, weights)
    return ids.to(torch.int32).contiguous(), weights.contiguous()
