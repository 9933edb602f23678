"""Routing in one int32 a slot: the form that FlashInfer's trtllm-gen kernels take (``PackedScoreIdx``)."""

from __future__ import annotations

import torch
from torch import Tensor

from .argument_checks import cpu_extremes, need_device, need_dtype, need_float
from .errors import need

_EXPERTS = 1 << 15  # an id has 16 bits with its sign


def pack_topk(topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Pack each expert and its weight into ``(id << 16) | bits of the weight in bfloat16``.

    Shapes: topk_ids and topk_weights of one shape, as a rule [T, K]. Returns int32 of that shape, contiguous.
    Dtypes: topk_ids int32 or int64; topk_weights any float, rounded to float32, then to bfloat16, each time to nearest
    even. Ids are -32768..32767; -1 (skip) stays -1.
    Raises: TypeError for dtypes; ValueError for shapes, and on a CPU for ids that do not fit into 16 bits (on other
    devices and in compiled graphs, which may not read data, their upper bits are lost).
    Source: FlashInfer ``trtllm_fp4_block_scale_routed_moe``.
    """
    op = "mxfp4_ops.pack_topk"
    need_dtype(op, "topk_ids", topk_ids, (torch.int32, torch.int64))
    need_float(op, "topk_weights", topk_weights)
    if topk_weights.shape != topk_ids.shape:  # a branch: torch.compile traces through here, and guards on it
        need(
            False,
            lambda: (
                f"{op}: topk_weights must have the shape of topk_ids, {list(topk_ids.shape)}, got "
                f"{list(topk_weights.shape)}."
            ),
        )
    need_device(op, "topk_weights", topk_weights, topk_ids, "topk_ids'")
    if not torch.compiler.is_compiling():
        low, high = cpu_extremes(topk_ids)
        need(
            low >= -_EXPERTS and high < _EXPERTS,
            lambda: (
                f"{op}: topk_ids must be from -{_EXPERTS} to {_EXPERTS - 1} to fit into 16 bits, got "
                f"{low if low < -_EXPERTS else high}."
            ),
        )
    bits = topk_weights.float().bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF
    return ((topk_ids.to(torch.int32) << 16) | bits).contiguous()


def unpack_topk(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Undo ``pack_topk``.

    Shapes: packed [T, K] (or any other) int32. Returns topk_ids int32 and topk_weights bfloat16, both of that shape
    and contiguous.
    Raises: TypeError unless packed is int32.
    """
    need_dtype("mxfp4_ops.unpack_topk", "packed", packed, (torch.int32,))
    packed = packed.contiguous()
    weights = ((packed << 16) >> 16).to(torch.int16).view(torch.bfloat16)
    return packed >> 16, weights
