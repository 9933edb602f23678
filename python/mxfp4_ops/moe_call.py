"""The op ``moe``: its arguments, its kernel for every device, its fake; and ``localise``, which it uses.

Python between a decode step and its kernel costs more than it seems: the weights have just passed through every cache,
so that each object touched comes from memory (0.5 ms of 3.2 in all, T = 1). A backend that checks its own inputs is
therefore called first, and the checks here run only when it refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import checks, token_checks
from .call_plan import CallPlan, plan_call
from .errors import need
from .layout import SLOTS
from .x_formats import INPUT_SCALES


@dataclass(slots=True)
class MoECall:
    """The arguments of ``moe``, in the schema's order."""

    op: ClassVar[str] = "mxfp4::moe"  # what messages call it
    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w13: Tensor
    w13_scale: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_bias: Tensor | None
    aux: Sequence[Tensor] | None
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
        if self.x_scale is None:
            token_checks.x_dtype(self.op, x)
        else:
            token_checks.quantized_x(self.op, x, self.x_scale, self.x_format)
        act = (self.activation, self.alpha, self.beta, self.limit)
        flags = (self.x_format, self.weight_on_input, self.batch_invariant)
        bias = self.w13_bias is not None or self.w2_bias is not None
        options = (self.hidden, self.intermediate, *act, *flags)
        return plan_call(self.op, self.layout, options, bias, self.dtype, x.device)

    @property
    def dtype(self) -> torch.dtype:
        """The result's: x's own, or bfloat16 where x comes quantized."""
        return self.x.dtype if self.x_scale is None else torch.bfloat16

    def new_rows(self, rows: int) -> Tensor:
        """Uninitialized rows of the result."""
        return self.x.new_empty((rows, self.hidden), dtype=self.dtype)

    def slots(self) -> dict[str, Tensor | None]:
        """The six packed tensors that every layout has, by name, unchecked."""
        return {name: getattr(self, name) for name in SLOTS}

    def check(self, plan: CallPlan) -> dict[str, Tensor | None]:
        """Refuse bad tensors; return the packed ones as backends take them."""
        op = self.op
        halves = self.x_scale is not None and self.x_format == "mxfp4"
        token_checks.moe_inputs(op, self.x, self.topk_ids, self.topk_weights, self.hidden, packed=halves)
        if self.x_scale is not None:
            token_checks.x_scale(op, self.x_scale, self.x, self.x_format, self.hidden)
        aux = self.aux or ()
        checks.aux(op, aux, plan.names)
        by_name = dict(zip(plan.names[len(SLOTS) :], aux, strict=True))
        scales = {name: by_name.pop(name) for name in INPUT_SCALES if name in by_name}
        sizes, gated = (self.hidden, self.intermediate), plan.activation.gated
        packed = checks.packed(op, self.slots() | by_name, plan.backend, *sizes, gated=gated, like=self.x)
        token_checks.input_scales(op, scales, self.w13)
        if self.expert_ids is not None:
            token_checks.expert_ids(op, self.expert_ids, self.w13.shape[0], self.x)
        return packed | scales

    def local_ids(self) -> Tensor:
        """topk_ids as rows of these weights, or -1; an error for ids out of range, on a CPU."""
        if self.expert_ids is None:
            token_checks.id_values(self.op, self.topk_ids, self.w13.shape[0])
            return self.topk_ids
        return _localised(self.op, self.topk_ids, self.expert_ids)

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
            x_scale=self.x_scale,
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
    return call.new_rows(call.x.shape[0])


def moe(*args: Any, **kwargs: Any) -> Tensor:
    call = MoECall(*args, **kwargs)
    plan = call.plan()
    out = _unchecked(call, plan)
    return _finished(call, plan, call.check(plan)) if out is None else out


def moe_out_fake(*args: Any, out: Tensor, **kwargs: Any) -> None:
    call = MoECall(*args, **kwargs)
    call.check(call.plan())
    _check_out(call, out)


def moe_out(*args: Any, out: Tensor, **kwargs: Any) -> None:
    """``moe`` into a caller's buffer, which may be x: it is written last."""
    call = MoECall(*args, **kwargs)
    plan = call.plan()
    packed = call.check(plan)
    _check_out(call, out)
    out.copy_(_finished(call, plan, packed))


def _check_out(call: MoECall, out: Tensor) -> None:
    op = f"{call.op}.out"
    checks.out(op, out, (call.x.shape[0], call.hidden), call.dtype, call.x)
    need(
        all(step != 0 or bool(size < 2) for step, size in zip(out.stride(), out.shape, strict=True)),
        lambda: f"{op}: out must have memory of its own for each element, got strides {list(out.stride())}.",
    )
    checks.no_gradient(op, out, call.x, call.topk_weights, call.w13_bias, call.w2_bias)


def _unchecked(call: MoECall, plan: CallPlan) -> Tensor | None:
    """The result by a backend that checks its inputs itself. None: there is something to say, or to convert."""
    if plan.backend.checks_inputs and call.expert_ids is None and call.x_scale is None and not call.aux:
        with contextlib.suppress(RuntimeError, AttributeError):  # None has no .contiguous()
            return call.run(plan, call.topk_ids, call.slots())
    return None


def _finished(call: MoECall, plan: CallPlan, packed: Mapping[str, Tensor | None]) -> Tensor:
    if call.x.shape[0] == 0:
        return call.new_rows(0)
    return call.run(plan, call.local_ids(), packed)


def localise_fake(topk_ids: Tensor, expert_ids: Tensor) -> Tensor:
    token_checks.topk_ids("mxfp4::localise", topk_ids)
    token_checks.expert_ids("mxfp4::localise", expert_ids, None, topk_ids)
    return topk_ids.new_empty(topk_ids.shape)


def localise(topk_ids: Tensor, expert_ids: Tensor) -> Tensor:
    localise_fake(topk_ids, expert_ids)
    return _localised("mxfp4::localise", topk_ids, expert_ids)


def _localised(op: str, topk_ids: Tensor, expert_ids: Tensor) -> Tensor:
    """``localise`` for checked dtypes and shapes; ``op`` is whose values they are."""
    token_checks.id_values(op, topk_ids, None)
    token_checks.expert_numbers(op, expert_ids)
    return shard_rows(topk_ids, expert_ids)


def shard_rows(topk_ids: Tensor, expert_ids: Tensor) -> Tensor:
    """``localise`` without its checks: reads no data on the host."""
    ids = topk_ids.contiguous()
    if expert_ids.shape[0] == 0:
        return torch.full_like(ids, -1)
    ordered, rows = expert_ids.to(ids.dtype).sort()
    place = torch.searchsorted(ordered, ids).clamp_max(ordered.shape[0] - 1)
    return torch.where((ordered[place] == ids) & (ids >= 0), rows[place].to(ids.dtype), -1)
