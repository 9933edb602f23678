"""The ops as documented Python functions. Each one calls the op of the same meaning in ``torch.ops.mxfp4``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .eager import unobserved
from .moe_call import at_once


def mxfp4_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_bias: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor,
    w2_bias: Tensor | None,
    aux: Sequence[Tensor] = (),
    expert_ids: Tensor | None = None,
    x_scale: Tensor | None = None,
    *,
    layout: str,
    hidden: int,
    intermediate: int,
    activation: str = "silu",
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    x_format: str = "none",
    weight_on_input: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """Run a mixture of experts on MXFP4 weights: ``sum_j w[t,j] (W2[e] act(W13[e] x[t] + b13[e]) + b2[e])``, e =
    ids[t,j].

    Shapes: x [T, hidden]; topk_ids, topk_weights [T, K]; weights, scales, biases and aux as ``layout`` says
    (``prepare_moe`` makes them; layout "canonical" takes checkpoint tensors as they are); expert_ids [E].
    Returns [T, hidden] in x's dtype, contiguous, sharing no storage.
    Dtypes: x float32, bfloat16 or float16; topk_ids int32 or int64, -1 skips the slot whatever its weight holds;
    topk_weights any float, used as given; codes and scales uint8 or same-byte views; expert_ids int32.
    expert_ids: the global number of each weight row; topk_ids are then global, and others than these are skipped.
    activation, alpha, beta, limit: ``mxfp4_ops.ACTIVATIONS``; None takes the activation's written default.
    x_format: "none" multiplies every element of x at its own precision. x_scale belongs to other forms and must be
    None. weight_on_input: the routing weight multiplies x instead of the result.
    batch_invariant: row t has the same bits whatever the other rows and T are.
    Raises: ValueError for shapes and values, TypeError for dtypes, Unsupported where the layout's backend cannot run
    this here; each before any work, naming op, argument, rule and value. On a CPU ids out of range are a ValueError;
    on other devices they are skipped.
    """
    tensors = (x, topk_ids, topk_weights, w13, w13_scale, w13_bias, w2, w2_scale, w2_bias, list(aux), expert_ids)
    options: dict[str, Any] = {
        "layout": layout, "hidden": hidden, "intermediate": intermediate,
        "activation": activation, "alpha": alpha, "beta": beta, "limit": limit,
        "x_format": x_format, "weight_on_input": weight_on_input, "batch_invariant": batch_invariant,
    }  # fmt: skip
    if unobserved(x, topk_ids, topk_weights, w13, w13_bias, w2_bias):
        out = at_once(*tensors, x_scale, **options)
        if out is not None:
            return out
    result: Tensor = torch.ops.mxfp4.moe(*tensors, x_scale, **options)
    return result


def quant_mxfp4(x: Tensor, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    """Round to MXFP4.

    Shapes: x [..., n], n a multiple of 32. Returns blocks [..., n/2] and scales [..., n/32], uint8.
    Dtypes: float32, bfloat16, float16. scale_rule: "even", "floor", "ceil" or "rceil" (``docs/format.md``).
    Elements go to the nearest value, ties to the even code, saturating at 6. NaN or Inf in a block gives scale byte
    255.
    Raises: ValueError when n is no multiple of 32 or the rule is unknown; TypeError for other dtypes.
    Source: OCP Microscaling Formats (MX) v1.0, section 6.3; ties as IEEE 754.
    """
    blocks, scales = torch.ops.mxfp4.quant(x, scale_rule=scale_rule)
    return blocks, scales


def dequant_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Expand MXFP4 to floating point.

    Shapes: blocks [..., n/2] uint8 or float4_e2m1fn_x2, low nibble first; scales [..., n/32] uint8 or float8_e8m0fnu.
    Returns [..., n]. Exact for float32 and bfloat16; float16 rounds to nearest even and overflows to Inf. Scale byte
    255 makes 32 NaNs, byte 0 is 2^-127.
    Raises: ValueError when the shapes do not belong together; TypeError for other scale dtypes.
    Source: OCP Microscaling Formats (MX) v1.0, definitions of FP4 (E2M1) and of the scale (E8M0).
    """
    return torch.ops.mxfp4.dequant(blocks, scales, dtype=dtype)


def dequant_mxfp4_out(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """Expand MXFP4 into ``out``, without a second tensor of its size: as ``dequant_mxfp4``, in out's dtype.

    Shapes: out [..., n], contiguous, which shares no memory with blocks or scales.
    Raises: ValueError when the shapes do not belong together or out is strided; TypeError for other dtypes.
    """
    torch.ops.mxfp4.dequant_out(blocks, scales, out)


def qdq_mxfp4(x: Tensor, scale_rule: str = "even") -> Tensor:
    """Round x to what MXFP4 can hold, in x's shape and dtype: ``dequant_mxfp4(*quant_mxfp4(x, rule), x.dtype)`` bit
    for bit."""
    return torch.ops.mxfp4.qdq(x, scale_rule=scale_rule)


def localise(topk_ids: Tensor, expert_ids: Tensor) -> Tensor:
    """Translate global expert numbers to rows of this shard, or -1.

    Shapes: topk_ids [...] int32 or int64; expert_ids [E] int32, the global number of each row, any order, no repeats.
    Returns [...] in topk_ids' dtype. Raises ValueError for ids below -1 and for repeats (CPU tensors).
    """
    return torch.ops.mxfp4.localise(topk_ids, expert_ids)


def route(
    logits: Tensor, top_k: int, method: str = "softmax_topk", *, renormalize: bool = True, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts for each token, in float32.

    Shapes: logits [T, E], any float. Returns topk_ids [T, top_k] int32 and topk_weights [T, top_k] float32, best
    first; of equal scores the lower expert wins. Methods: "softmax_topk" (softmax over all experts, then the top k,
    divided by their sum if ``renormalize``), "topk_softmax" (the top k logits, then softmax over them). ``scale``
    multiplies the weights.
    Raises: ValueError for an unknown method or a top_k outside 1..E.
    """
    ids, weights = torch.ops.mxfp4.route(
        logits, None, None, None, top_k, method=method, renormalize=renormalize, scale=scale
    )
    return ids, weights
