"""The derivative of ``route``: the weights as a function of the logits, once the experts are chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# What each method takes as an expert's score before its weights are made of the chosen ones. Choosing first and
# softmax after is dividing by the sum of the chosen.
_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax_topk": lambda logits: logits.softmax(-1),
    "topk_softmax": lambda logits: logits.softmax(-1),
}


def weights_at(logits: Tensor, ids: Tensor, method: str, renormalize: bool, scale: float) -> Tensor:
    """The weights [T, K] of the experts ``ids`` for logits [T, E], in the logits' dtype, by differentiable ops."""
    chosen = _SCORES[method](logits).gather(-1, ids.long())
    return (chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen) * scale


def route_backward(
    grad_weights: Tensor, logits: Tensor, ids: Tensor, method: str, renormalize: bool, scale: float
) -> Tensor:
    """The gradient [T, E] with respect to the logits, in their dtype; ids are constants. Differentiable itself."""
    with torch.enable_grad():
        weights = weights_at(logits.float(), ids, method, renormalize, scale)
    (gradient,) = torch.autograd.grad(weights, logits, grad_weights, create_graph=torch.is_grad_enabled())
    return gradient
