"""What a ``moe`` call decides once: all that follows from its options and its device, and not from its tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from . import checks, token_checks
from .activation import Activation, Resolved, resolve
from .backends import Backend
from .dispatch import backend_of
from .errors import Unsupported
from .problem import MoEProblem, arch_of
from .x_formats import INPUT_SCALES


@dataclass(frozen=True)
class CallPlan:
    """Who runs the call, the activation with its numbers, and the names of the packed tensors in order."""

    backend: Backend
    activation: Resolved
    names: tuple[str, ...]


@functools.lru_cache(maxsize=1024)
def plan_call(
    op: str,
    tag: str,
    problem: tuple[int, int, str, float | None, float | None, float | None, str, bool, bool],
    bias: bool,
    x_dtype: torch.dtype,
    device: torch.device,
) -> CallPlan:
    """Honour or refuse the options: what the layout's backend cannot do on x's device is an error with every reason.

    Cached, since a model asks the same at every call; a refusal is not. ``checks.x_dtype`` comes before it.
    """
    hidden, intermediate, name, alpha, beta, limit, x_format, weight_on_input, batch_invariant = problem
    backend, act = backend_of(op, tag), resolve(op, name, alpha, beta, limit)
    names = tuple(checks.names(op, backend, hidden, intermediate, gated=act.gated))
    token_checks.x_format(op, x_format)
    names += INPUT_SCALES if x_format == "fp8_static" else ()
    if device.type == "meta":
        return CallPlan(backend, act, names)  # shapes only: any layout may be traced anywhere
    asked = MoEProblem(
        arch=arch_of(device),
        experts=1,  # not a matter of the call: the weights are packed
        hidden=hidden,
        intermediate=intermediate,
        x_dtype=x_dtype,
        x_format=x_format,
        activation=Activation(name, alpha, beta, limit),
        bias=bias,
        weight_on_input=weight_on_input,
        batch_invariant=batch_invariant,
    )
    reasons = list(backend.why_not(asked))
    if reasons:
        raise Unsupported(f"{op}: layout {tag!r} cannot run here: {'; '.join(reasons)}.")
    return CallPlan(backend, act, names)
