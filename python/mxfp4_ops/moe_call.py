"""The op ``moe``: its arguments, its kernel for every device, its fake; and ``localise``, which it uses.

Python between a decode step and its kernel costs more than it seems: the weights have just passed through every cache,
so that each object touched comes from memory (0.5 ms of 3.2 in all, T = 1). A backend that checks its own inputs is
therefore called first, and the checks here run only when it refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import checks
from .call_plan import CallPlan, plan_call
from .layout import SLOTS

_OP = "mxfp4::moe"


@dataclass(slots=True)
class MoECall:
    """The arguments of ``moe``, in the schema's order."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w13: Tensor
    w13_scale: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_bias: Tensor | None
    aux: Sequence[Tensor]
    expert_ids: Tensor | None = None
    x_scale: Tensor | None = None
    layout: str = ""
    hidden: int = 0
    intermediate: int = 0
    activation: str = "silu"
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None
    x_format: str = "none"
    weight_on_input: bool = False
    batch_invariant: bool = False

    def plan(self) -> CallPlan:
        """Who runs the call; an error where its options cannot be honoured on x's device."""
        x = self.x
        checks.x_dtype(_OP, x)
        act = (self.activation, self.alpha, self.beta, self.limit)
        flags = (self.x_format, self.weight_on_input, self.batch_invariant)
        bias = self.w13_bias is not None or self.w2_bias is not None
        return plan_call(_OP, self.layout, (self.hidden, self.intermediate, *act, *flags), bias, x.dtype, x.device)

    def slots(self) -> dict[str, Tensor | None]:
        """The six packed tensors that every layout has, by name, unchecked."""
        return {name: getattr(self, name) for name in SLOTS}

    def check(self, plan: CallPlan) -> dict[str, Tensor | None]:
        """Refuse bad tensors; return the packed ones as backends take them."""
        checks.x_scale(_OP, self.x_scale, self.x_format)
        checks.moe_inputs(_OP, self.x, self.topk_ids, self.topk_weights, self.hidden)
        checks.aux(_OP, self.aux, plan.names)
        sizes, gated = (self.hidden, self.intermediate), plan.activation.gated
        tensors = self.slots() | dict(zip(plan.names[len(SLOTS) :], self.aux, strict=True))
        packed = checks.packed(_OP, tensors, plan.backend, *sizes, gated=gated, like=self.x)
        if self.expert_ids is not None:
            checks.expert_ids(_OP, self.expert_ids, self.w13.shape[0], self.x)
        return packed

    def run(self, plan: CallPlan, ids: Tensor, packed: Mapping[str, Tensor | None]) -> Tensor:
        return plan.backend.run(
            self.x,
            ids,
            self.topk_weights,
            packed,
            plan.activation,
            hidden=self.hidden,
            intermediate=self.intermediate,
            x_format=self.x_format,
            weight_on_input=self.weight_on_input,
            batch_invariant=self.batch_invariant,
        )


def at_once(*args: Any, **kwargs: Any) -> Tensor | None:
    """``moe`` without the dispatcher, for arguments that ``eager.unobserved`` has seen. None: ask the op, which knows
    why."""
    try:
        call = MoECall(*args, **kwargs)
        plan = call.plan()
    except (RuntimeError, ValueError, TypeError):
        return None
    return _unchecked(call, plan)


def moe_fake(*args: Any, **kwargs: Any) -> Tensor:
    call = MoECall(*args, **kwargs)
    call.check(call.plan())
    return call.x.new_empty(call.x.shape)


def moe(*args: Any, **kwargs: Any) -> Tensor:
    call = MoECall(*args, **kwargs)
    plan = call.plan()
    out = _unchecked(call, plan)
    return _checked(call, plan) if out is None else out


def _unchecked(call: MoECall, plan: CallPlan) -> Tensor | None:
    """The result by a backend that checks its inputs itself. None: there is something to say, or to convert."""
    if plan.backend.checks_inputs and call.expert_ids is None and call.x_scale is None and not call.aux:
        with contextlib.suppress(RuntimeError, AttributeError):  # None has no .contiguous()
            return call.run(plan, call.topk_ids, call.slots())
    return None


def _checked(call: MoECall, plan: CallPlan) -> Tensor:
    packed = call.check(plan)
    if call.x.shape[0] == 0:
        return call.x.new_empty(call.x.shape)
    ids = call.topk_ids
    if call.expert_ids is None:
        checks.id_values(_OP, ids, call.w13.shape[0])
    else:
        ids = _localise(_OP, ids, call.expert_ids)
    return call.run(plan, ids, packed)


def localise_fake(topk_ids: Tensor, expert_ids: Tensor) -> Tensor:
    checks.topk_ids("mxfp4::localise", topk_ids)
    checks.expert_ids("mxfp4::localise", expert_ids, None, topk_ids)
    return topk_ids.new_empty(topk_ids.shape)


def localise(topk_ids: Tensor, expert_ids: Tensor) -> Tensor:
    localise_fake(topk_ids, expert_ids)
    return _localise("mxfp4::localise", topk_ids, expert_ids)


def _localise(op: str, topk_ids: Tensor, expert_ids: Tensor) -> Tensor:
    """Rows of the experts in checked ids, -1 for those of other shards; ``op`` is whose values they are."""
    checks.id_values(op, topk_ids, None)
    checks.expert_numbers(op, expert_ids)
    ids = topk_ids.contiguous()
    if expert_ids.shape[0] == 0:
        return torch.full_like(ids, -1)
    ordered, rows = expert_ids.to(ids.dtype).sort()
    place = torch.searchsorted(ordered, ids).clamp_max(ordered.shape[0] - 1)
    return torch.where((ordered[place] == ids) & (ids >= 0), rows[place].to(ids.dtype), -1)
