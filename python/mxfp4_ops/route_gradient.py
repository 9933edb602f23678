"""The derivative of ``route``: the weights as a function of the logits, once the experts are chosen.

``routing.py`` moves bits, which torch cannot differentiate; here the same functions stand as torch has them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .routing import METHODS


def _sqrtsoftplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + e^x)); far below 0 as e^(x/2), whose slope stays right where the root's would be Inf times 0."""
    low = x < -40
    return torch.where(low, (x / 2).exp(), torch.nn.functional.softplus(torch.where(low, 0.0, x)).sqrt())


# Choosing first and softmax after, as topk_softmax does, is dividing by the sum of the chosen.
_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}


def weights_at(logits: Tensor, ids: Tensor, method: str, renormalize: bool, scale: float) -> Tensor:
    """The weights [T, K] of the experts ``ids``, or 0 for -1, for logits [T, E], in the logits' dtype."""
    chosen = _SCORES[METHODS[method].score](logits).gather(-1, ids.clamp_min(0).long())
    chosen = torch.where(ids < 0, 0.0, chosen)
    if not renormalize:
        return chosen * scale
    total = chosen.sum(-1, keepdim=True)
    return chosen / torch.where(total == 0, 1.0, total) * scale


def route_backward(
    grad_weights: Tensor, logits: Tensor, ids: Tensor, method: str, renormalize: bool, scale: float
) -> Tensor:
    """The gradient [T, E] with respect to the logits, in their dtype; ids are constants. Differentiable itself."""
    with torch.enable_grad():
        weights = weights_at(logits.float(), ids, method, renormalize, scale)
    (gradient,) = torch.autograd.grad(weights, logits, grad_weights, create_graph=torch.is_grad_enabled())
    return gradient
