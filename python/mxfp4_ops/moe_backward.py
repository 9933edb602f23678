"""The op ``moe_backward``: gradients of ``moe`` by x, routing weights and biases, with the packed experts frozen.

Expert by expert: unpack, expand to float32, compute the forward again, go back, drop. So the peak is one expert in
float32, for any layout, since only ``Layout.unpack`` and ``Layout.pack`` know how bytes lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import reference, token_checks
from .activation import Resolved
from .call_plan import CallPlan
from .experts import pad_expert
from .layout import BIASES
from .moe_call import MoECall
from .packing import unpack_expert
from .reference import product

_OP = "mxfp4::moe_backward"
_Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # of x, topk_weights, w13_bias, w2_bias


class _BackwardCall(MoECall):
    op: ClassVar[str] = _OP


@dataclass(frozen=True)
class DenseExpert:
    """One expert expanded: w13 [S*I, H], w13_bias [S*I], w2 [H, I], w2_bias [H]; an absent bias is None."""

    w13: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_bias: Tensor | None


def expert_backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    expert: DenseExpert,
    activation: Resolved,
    *,
    weight_on_input: bool,
    round_intermediate: bool,
    batch_invariant: bool = False,
) -> _Gradients:
    """Differentiate ``reference.moe`` for the n slots of one expert, in the dtype of its arguments.

    Shapes: grad_output, x [n, H]; weight [n, 1]. Returns, slot by slot, the gradients of x [n, H], weight [n], the
    rows that w13_bias was added to [n, S*I] and those of w2_bias [n, H]. The rounding of the intermediate passes its
    gradient through unchanged; where its value enters (the gradient of weight) it is the rounded one.
    """
    bare = product(x, expert.w13, batch_invariant)
    h = bare * weight if weight_on_input else bare
    h = h if expert.w13_bias is None else h + expert.w13_bias
    back = product(grad_output, expert.w2.t(), batch_invariant)  # [n, I], the gradient after the activation
    grad_y = grad_output if weight_on_input else grad_output * weight
    grad_h = activation.backward(h, back if weight_on_input else back * weight)
    if weight_on_input:
        grad_weight, grad_bare = _row_sums(grad_h * bare, batch_invariant), grad_h * weight
    else:
        a = activation(h)
        a = a.to(torch.bfloat16).to(a.dtype) if round_intermediate else a
        grad_weight, grad_bare = _row_sums(back * a, batch_invariant), grad_h
        if expert.w2_bias is not None:
            grad_weight = grad_weight + _row_sums(grad_output * expert.w2_bias, batch_invariant)
    return product(grad_bare, expert.w13.t(), batch_invariant), grad_weight, grad_h, grad_y


def _row_sums(rows: Tensor, batch_invariant: bool) -> Tensor:
    """Sums of rows [n, k], [n]; row by row where the order of additions may not depend on n."""
    return torch.stack([row.sum() for row in rows]) if batch_invariant else rows.sum(-1)


def moe_backward_fake(grad_output: Tensor, *args: Any, output_mask: Sequence[bool], **kwargs: Any) -> _Gradients:
    call = _BackwardCall(*args, **kwargs)
    _check(grad_output, call, output_mask)
    x, weights, w13_bias, w2_bias = (like.new_empty(like.shape) for like in _outputs_like(call, output_mask))
    return x, weights, w13_bias, w2_bias


def moe_backward(grad_output: Tensor, *args: Any, output_mask: Sequence[bool], **kwargs: Any) -> _Gradients:
    call = _BackwardCall(*args, **kwargs)
    plan, packed = _check(grad_output, call, output_mask)
    x, weights, w13_bias, w2_bias = (torch.zeros_like(like) for like in _outputs_like(call, output_mask))
    grad_x = torch.zeros(call.x.shape, dtype=torch.float32, device=x.device)
    grad_weights = torch.zeros(call.topk_ids.numel(), dtype=torch.float32, device=x.device)
    present = {n: t for n, t in packed.items() if t is not None}
    biases = {n: t for n, t in zip(BIASES, (w13_bias, w2_bias), strict=True) if t.numel()}
    ids, top_k = call.local_ids().flatten(), call.topk_ids.shape[1]
    for e in range(call.w13.shape[0]):
        chosen = ids == e
        slots = reference.slots_of(chosen)
        if slots.numel() == 0:
            continue
        expert = unpack_expert(
            present,
            e,
            plan.backend.layout,
            hidden=call.hidden,
            intermediate=call.intermediate,
            gated=plan.activation.gated,
        )
        rows, weight, *sums = _of_expert(grad_output, call, plan, expert, chosen, slots)
        grad_weights[slots] += weight
        if reference.host_reads_ids(x.device):
            grad_x.index_add_(0, slots // top_k, rows)
        else:  # all slots, in their order: adding by index would use atomics there, in any order
            grad_x += rows.view(-1, top_k, call.hidden).sum(1)
        if biases:
            _add_biases(biases, e, plan, expert, dict(zip(BIASES, sums, strict=True)))
    if output_mask[0]:
        x = grad_x.to(x.dtype)
    if output_mask[1]:
        weights = grad_weights.view(call.topk_ids.shape).to(weights.dtype)
    return x, weights, w13_bias, w2_bias


def _check(
    grad_output: Tensor, call: MoECall, output_mask: Sequence[bool]
) -> tuple[CallPlan, dict[str, Tensor | None]]:
    if call.x_format != "none":
        raise NotImplementedError(
            f"{_OP}: a gradient of mxfp4::moe exists for x_format 'none' alone, got {call.x_format!r}. Detach the "
            "inputs, or call it under torch.no_grad()."
        )
    plan = call.plan()
    packed = call.check(plan)
    token_checks.moe_backward(_OP, grad_output, call.x, output_mask, call.slots())
    return plan, packed


def _outputs_like(call: MoECall, output_mask: Sequence[bool]) -> list[Tensor]:
    """Tensors with the shape and dtype of the four results; one that is not asked for has size zero."""
    inputs = (call.x, call.topk_weights, call.w13_bias, call.w2_bias)
    return [
        call.x.new_empty(t.shape, dtype=t.dtype) if wanted and t is not None else call.x.new_empty(0)
        for t, wanted in zip(inputs, output_mask, strict=True)
    ]


def _of_expert(
    grad_output: Tensor, call: MoECall, plan: CallPlan, expert: Mapping[str, Tensor], chosen: Tensor, slots: Tensor
) -> _Gradients:
    """Gradients of x [n, H] and weight [n] at the slots, zero where not chosen, and those of the two biases, summed."""
    tokens, mine = slots // call.topk_ids.shape[1], chosen[slots]
    gradients = expert_backward(
        grad_output[tokens].float(),
        call.x[tokens].float(),
        call.topk_weights.flatten()[slots, None].float(),
        _expand(expert),
        plan.activation,
        weight_on_input=call.weight_on_input,
        round_intermediate=call.x.dtype is not torch.float32,
        batch_invariant=call.batch_invariant,
    )
    x, weight, w13_bias, w2_bias = (torch.where(mine.view(-1, *(1,) * (g.dim() - 1)), g, 0) for g in gradients)
    return x, weight, w13_bias.sum(0), w2_bias.sum(0)


def _expand(expert: Mapping[str, Tensor]) -> DenseExpert:
    bias = {n: expert[n].float() if n in expert else None for n in BIASES}
    w13, w2 = (torch.ops.mxfp4.dequant(expert[n], expert[f"{n}_scale"], dtype=torch.float32) for n in ("w13", "w2"))
    return DenseExpert(w13, bias["w13_bias"], w2, bias["w2_bias"])


def _add_biases(
    out: Mapping[str, Tensor], row: int, plan: CallPlan, expert: Mapping[str, Tensor], sums: Mapping[str, Tensor]
) -> None:
    """Put one expert's gradients where ``pack`` puts its biases: a layout may move their numbers and change nothing."""
    layout, gated = plan.backend.layout, plan.activation.gated
    moved = layout.pack(pad_expert(dict(expert) | {n: sums[n] for n in out}, layout, gated=gated), gated)
    for name, gradient in out.items():
        gradient[row].copy_(moved[name])
