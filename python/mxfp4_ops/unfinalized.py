"""The ops ``moe_unfinalized`` and ``finalize``: the layer before its weighted sum, and the sum.

A framework that adds other things in the same pass (shared experts, an all-reduce) takes the rows and sums itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import token_checks
from .call_plan import CallPlan
from .moe_call import MoECall


class UnfinalizedCall(MoECall):
    op: ClassVar[str] = "mxfp4::moe_unfinalized"


def moe_unfinalized_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = UnfinalizedCall(*args, **kwargs)
    call.check(call.plan())
    return call.new_rows(call.topk_ids.numel()), call.topk_ids.new_empty(call.topk_ids.shape, dtype=torch.int32)


def moe_unfinalized(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Slot [t, j] is a token of its own with one expert and weight 1, so every backend has this op."""
    call = UnfinalizedCall(*args, **kwargs)
    plan = call.plan()
    packed = call.check(plan)
    return rows_before_sum(call, plan, packed, call.local_ids())


def rows_before_sum(
    call: UnfinalizedCall, plan: CallPlan, packed: Mapping[str, Tensor | None], ids: Tensor
) -> tuple[Tensor, Tensor]:
    """``moe_unfinalized`` without its checks, for local ids: reads no data on the host."""
    top_k = call.topk_ids.shape[1]
    slots = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view(ids.shape)
    row_of_slot = torch.where((ids < 0) | (ids >= call.w13.shape[0]), -1, slots).contiguous()  # whatever ids' strides
    token = torch.arange(call.x.shape[0], device=ids.device).repeat_interleave(top_k)
    weights = call.topk_weights if call.weight_on_input else torch.ones_like(call.topk_weights)
    each = dataclasses.replace(
        call,
        x=_take(call.x, token),
        x_scale=None if call.x_scale is None else _take(call.x_scale, token),
        topk_weights=weights.reshape(-1, 1),
    )
    return each.run(plan, ids.reshape(-1, 1), packed), row_of_slot


def _take(rows: Tensor, token: Tensor) -> Tensor:
    """rows[token], also in the dtypes that torch cannot index."""
    if rows.element_size() > 1:
        return rows[token]
    return rows.view(torch.uint8)[token].view(rows.dtype)


def finalize_fake(rows: Tensor, row_of_slot: Tensor, topk_weights: Tensor) -> Tensor:
    token_checks.finalize("mxfp4::finalize", rows, row_of_slot, topk_weights)
    return rows.new_empty(row_of_slot.shape[0], rows.shape[1])


def finalize(rows: Tensor, row_of_slot: Tensor, topk_weights: Tensor) -> Tensor:
    """Slot by slot, so that a row's bits do not depend on how many there are."""
    token_checks.finalize("mxfp4::finalize", rows, row_of_slot, topk_weights)
    token_checks.row_values("mxfp4::finalize", row_of_slot, rows.shape[0])
    return weighted_sum(rows, row_of_slot, topk_weights)


def weighted_sum(rows: Tensor, row_of_slot: Tensor, topk_weights: Tensor) -> Tensor:
    """``finalize`` without its checks: reads no data on the host."""
    total = rows.new_zeros(row_of_slot.shape[0], rows.shape[1], dtype=torch.float32)
    if rows.shape[0]:
        for place, weight in zip(row_of_slot.unbind(1), topk_weights.float().unbind(1), strict=True):
            present = (place >= 0) & (place < rows.shape[0])
            row = rows[place.clamp(0, rows.shape[0] - 1)].float()
            total = total + torch.where(present[:, None], row * weight[:, None], 0.0)
    return total.to(rows.dtype)
