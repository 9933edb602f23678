"""The activations between the two products: one table of formulas, and what alpha, beta and limit mean in each.

All formulas are in float32, after the bias; g is the gate half and u the up half of the first product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .argument_checks import need_float32
from .errors import need

NO_LIMIT = math.inf


def _clamped(g: Tensor, u: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Clamp the gate from above only and the up half on both sides, as gpt-oss and DeepSeek-V4 do."""
    return (g, u) if limit == NO_LIMIT else (g.clamp(max=limit), u.clamp(-limit, limit))


def _silu(g: Tensor, u: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    g, u = _clamped(g, u, limit)
    return g * torch.sigmoid(g) * u


def _swigluoai(g: Tensor, u: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    g, u = _clamped(g, u, limit)
    return g * torch.sigmoid(alpha * g) * (u + beta)


def _swiglustep(g: Tensor, u: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    gate = g * torch.sigmoid(g)
    return gate * u if limit == NO_LIMIT else gate.clamp(max=limit) * u.clamp(-limit, limit)


def _situ(g: Tensor, u: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    linear = u if beta == math.inf else beta * torch.tanh(u / beta)
    return alpha * torch.tanh(g / alpha) * torch.sigmoid(g) * linear


def _gelu(g: Tensor) -> Tensor:
    return torch.nn.functional.gelu(g)


def _gelu_tanh(g: Tensor) -> Tensor:
    return torch.nn.functional.gelu(g, approximate="tanh")


# --- derivatives ------------------------------------------------------------------------------------------------------
#
# With respect to g and u, by hand: inside an op's kernel torch records nothing, so autograd cannot give them there. A
# clamp's derivative is 1 up to and at its bound and 0 beyond it, as torch has it; a NaN stays NaN.

_SATURATED = 30.0  # beyond it the slope of a gelu is 0 or 1 in every float, where g^2 could overflow


def _swigluoai_slopes(g: Tensor, u: Tensor, alpha: float, beta: float, limit: float) -> tuple[Tensor, Tensor]:
    beyond_g, beyond_u = g > limit, u.abs() > limit
    g, u = _clamped(g, u, limit)
    dg = _silu_slope(alpha * g) * (u + beta)
    return dg.masked_fill(beyond_g, 0), (g * torch.sigmoid(alpha * g)).masked_fill(beyond_u, 0)


def _silu_slopes(g: Tensor, u: Tensor, alpha: float, beta: float, limit: float) -> tuple[Tensor, Tensor]:
    return _swigluoai_slopes(g, u, 1.0, 0.0, limit)


def _swiglustep_slopes(g: Tensor, u: Tensor, alpha: float, beta: float, limit: float) -> tuple[Tensor, Tensor]:
    gate = g * torch.sigmoid(g)
    dg = (_silu_slope(g) * u.clamp(-limit, limit)).masked_fill(gate > limit, 0)
    return dg, gate.clamp(max=limit).masked_fill(u.abs() > limit, 0)


def _situ_slopes(g: Tensor, u: Tensor, alpha: float, beta: float, limit: float) -> tuple[Tensor, Tensor]:
    s, t = torch.sigmoid(g), torch.tanh(g / alpha)
    linear, slope = (u, torch.ones_like(u)) if beta == math.inf else _soft_clip(u, beta)
    return s * (1 - t.square() + alpha * t * (1 - s)) * linear, alpha * t * s * slope


def _soft_clip(u: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """beta tanh(u / beta) and its derivative."""
    t = torch.tanh(u / beta)
    return beta * t, 1 - t.square()


def _gelu_slope(g: Tensor, approximate: str = "none") -> Tensor:
    g = g.clamp(-_SATURATED, _SATURATED)
    return torch.ops.aten.gelu_backward(torch.ones_like(g), g, approximate=approximate)


def _silu_slope(g: Tensor) -> Tensor:
    s = torch.sigmoid(g)
    return s * (1 + g * (1 - s))


@dataclass(frozen=True)
class Formula:
    """One row of the table. A default of None says that the activation has no such parameter and refuses one."""

    code: int  # of the native kernels
    gated: bool  # two halves (gate rows, then up rows), or one
    text: str
    apply: Callable[[Tensor, Tensor, float, float, float], Tensor]
    slopes: Callable[[Tensor, Tensor, float, float, float], tuple[Tensor, ...]]  # by g and, where gated, by u
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None


ACTIVATIONS: dict[str, Formula] = {
    "silu": Formula(
        0, True, "g' sigmoid(g') u', g' = min(g, limit), u' = clamp(u, +-limit)", _silu, _silu_slopes, limit=NO_LIMIT
    ),
    "swigluoai": Formula(
        1, True, "g' sigmoid(alpha g') (u' + beta), clamped as silu", _swigluoai, _swigluoai_slopes,
        alpha=1.702, beta=1.0, limit=NO_LIMIT,
    ),
    "swiglustep": Formula(
        2, True, "min(silu(g), limit) clamp(u, +-limit)", _swiglustep, _swiglustep_slopes, limit=7.0
    ),
    "situ": Formula(
        3, True, "alpha tanh(g/alpha) sigmoid(g) beta tanh(u/beta); beta inf: u itself", _situ, _situ_slopes,
        alpha=4.0, beta=25.0,
    ),
    "gelu": Formula(
        4, True, "g/2 (1 + erf(g/sqrt 2)) u", lambda g, u, *_: _gelu(g) * u,
        lambda g, u, *_: (_gelu_slope(g) * u, _gelu(g)),
    ),
    "gelu_tanh": Formula(
        5, True, "g/2 (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) u", lambda g, u, *_: _gelu_tanh(g) * u,
        lambda g, u, *_: (_gelu_slope(g, "tanh") * u, _gelu_tanh(g)),
    ),
    "relu2_no_mul": Formula(
        6, False, "max(g, 0)^2", lambda g, u, *_: torch.relu(g).square(), lambda g, u, *_: (2 * torch.relu(g),)
    ),
    "silu_no_mul": Formula(
        7, False, "g sigmoid(g)", lambda g, u, *_: g * torch.sigmoid(g), lambda g, u, *_: (_silu_slope(g),)
    ),
    "gelu_no_mul": Formula(
        8, False, "g/2 (1 + erf(g/sqrt 2))", lambda g, u, *_: _gelu(g), lambda g, u, *_: (_gelu_slope(g),)
    ),
    "gelu_tanh_no_mul": Formula(
        9, False, "gelu_tanh without u", lambda g, u, *_: _gelu_tanh(g), lambda g, u, *_: (_gelu_slope(g, "tanh"),)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Activation:
    """An activation with its parameters; None takes the default written in ``ACTIVATIONS``.

    ``limit=float("inf")`` switches the limit off where the default has one. Ops take the four fields as arguments;
    ``PackedExperts`` and ``MXFP4Experts`` keep them with the weights.
    """

    name: str = "silu"
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None

    @property
    def gated(self) -> bool:
        return ACTIVATIONS[self.name].gated


@dataclass(frozen=True)
class Resolved:
    """What a kernel needs: no None left. A parameter that the activation lacks stands at 0 (alpha, beta) or inf
    (limit)."""

    name: str
    code: int
    gated: bool
    alpha: float
    beta: float
    limit: float

    def __call__(self, h: Tensor) -> Tensor:
        """Apply to h [..., S*I] float32, gate half first; returns [..., I]."""
        g, u = h.chunk(2, dim=-1) if self.gated else (h, h)
        return ACTIVATIONS[self.name].apply(g, u, self.alpha, self.beta, self.limit)

    def backward(self, h: Tensor, grad: Tensor) -> Tensor:
        """The gradient [..., S*I] with respect to h, for grad [..., I] of the result."""
        g, u = h.chunk(2, dim=-1) if self.gated else (h, h)
        slopes = ACTIVATIONS[self.name].slopes(g, u, self.alpha, self.beta, self.limit)
        return torch.cat([grad * slope for slope in slopes], dim=-1)


@functools.lru_cache(maxsize=256)
def resolve(op: str, name: str, alpha: float | None, beta: float | None, limit: float | None) -> Resolved:
    """Fill in the defaults, or refuse: an unknown name, a parameter that the activation does not use, a value out of
    range."""
    need(name in ACTIVATIONS, lambda: f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}.")
    row = ACTIVATIONS[name]
    return Resolved(
        name,
        row.code,
        row.gated,
        alpha=_parameter(op, name, "alpha", alpha, row.alpha, absent=0.0),
        beta=_parameter(op, name, "beta", beta, row.beta, absent=0.0),
        limit=_parameter(op, name, "limit", limit, row.limit, absent=NO_LIMIT),
    )


def _parameter(op: str, name: str, key: str, value: float | None, default: float | None, *, absent: float) -> float:
    """The value to compute with: the caller's, or the table's, or ``absent`` where the formula has no such
    parameter."""
    need(
        value is None or default is not None,
        lambda: f"{op}: {key} must be None for activation {name!r}, which does not use it, got {value}.",
    )
    if default is None:
        return absent
    number = default if value is None else float(value)
    positive = key == "limit" or name == "situ"  # clamps and soft clips have a size
    kind = "positive" if positive else "finite"
    fits = number > 0 if positive else not math.isnan(number)
    finite_or_open = math.isfinite(number) or (number > 0 and (key == "limit" or (name == "situ" and key == "beta")))
    need(
        fits and finite_or_open,
        lambda: f"{op}: {key} must be a {kind} number for activation {name!r}, got {number}.",
    )
    if math.isfinite(number):
        need_float32(op, key, number)
    return number
