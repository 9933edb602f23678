"""The ops as documented Python functions. Each one calls the op of the same meaning in ``torch.ops.mxfp4``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import token_checks
from .eager import unobserved
from .moe_call import at_once
from .route_call import route_kernel
from .x_formats import FORMS, quantize


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
    out: Tensor | None = None,
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
    x_format: how x and the activation's result enter the products, ``mxfp4_ops.X_FORMATS``; "none" takes every element
    at its own precision. x_scale: x is quantized already, as ``quant_x`` does it; the result is bfloat16 then.
    weight_on_input: the routing weight multiplies x, before it is rounded, instead of the result.
    batch_invariant: row t has the same bits whatever the other rows and T are.
    out: where to write the result, [T, hidden] in its dtype, any strides; it is returned. It may be x.
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
    if out is not None:
        torch.ops.mxfp4.moe.out(*tensors, x_scale, **options, out=out)
        return out
    if unobserved(x, topk_ids, topk_weights, w13, w13_bias, w2_bias):
        quick = at_once(*tensors, x_scale, **options)
        if quick is not None:
            return quick
    result: Tensor = torch.ops.mxfp4.moe(*tensors, x_scale, **options)
    return result


def quant_mxfp4(x: Tensor, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    """Round to MXFP4.

    Shapes: x [..., n], n a multiple of 32. Returns blocks [..., n/2] and scales [..., n/32], uint8.
    Dtypes: float32, bfloat16, float16. scale_rule: "even", "floor", "ceil" or "rceil"; "mse" for the least squared
    error; or a library whose bytes are wanted: ``mxfp4_ops.QUANT_MODES``, ``docs/format.md``.
    Elements go to the nearest value, ties to the even code, saturating at 6. NaN or Inf in a block gives scale byte
    255. Modes of other libraries differ in this as their rows say.
    Raises: ValueError when n is no multiple of 32 or the rule is unknown; TypeError for other dtypes.
    Source: OCP Microscaling Formats (MX) v1.0, section 6.3; ties as IEEE 754.
    """
    blocks, scales = torch.ops.mxfp4.quant(x, scale_rule=scale_rule)
    return blocks, scales


def dequant_mxfp4(
    blocks: Tensor, scales: Tensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Expand MXFP4 to floating point.

    Shapes: blocks [..., n/2] uint8 or float4_e2m1fn_x2, low nibble first; scales [..., n/32] uint8 or float8_e8m0fnu.
    Returns [..., n] in ``dtype``, bfloat16 by default; or ``out``, contiguous, in its own dtype, which is written
    without other memory of that size. Exact for float32 and bfloat16; float16 rounds to nearest even and overflows to
    Inf. Scale byte 255 makes 32 NaNs, byte 0 is 2^-127.
    Raises: ValueError when the shapes do not belong together; TypeError for other scale dtypes.
    Source: OCP Microscaling Formats (MX) v1.0, definitions of FP4 (E2M1) and of the scale (E8M0).
    """
    if out is None:
        return torch.ops.mxfp4.dequant(blocks, scales, dtype=dtype)
    torch.ops.mxfp4.dequant.out(blocks, scales, dtype=dtype, out=out)
    return out


def qdq_mxfp4(x: Tensor, scale_rule: str = "even") -> Tensor:
    """Round x to what MXFP4 can hold, in x's shape and dtype: ``dequant_mxfp4(*quant_mxfp4(x, rule), x.dtype)`` bit
    for bit."""
    return torch.ops.mxfp4.qdq(x, scale_rule=scale_rule)


def quant_x(x: Tensor, x_format: str) -> tuple[Tensor, Tensor]:
    """Quantize activations: what ``mxfp4_moe`` takes as x and x_scale, and does itself where it is given x alone.

    Shapes: x [T, H] float32, bfloat16 or float16; returns x [T, H] (mxfp4 [T, H/2]) and x_scale [T, G], G groups a row.
    x_format "int8": int8 and float32, groups of 32; "fp8": float8_e4m3fn and float32, groups of 128, the last one may
    be shorter; "fp8_row": the same, one group; "mxfp8": float8_e4m3fn and E8M0 bytes, groups of 32; "mxfp4":
    ``quant_mxfp4(x)``. Formulas: ``docs/format.md``. NaN or Inf makes its group NaN.
    Raises: ValueError for another x_format or an H that is no multiple of 32; TypeError for other dtypes.
    """
    op = "mxfp4_ops.quant_x"
    token_checks.quant_x(op, x, x_format)
    planes, scale = quantize(x.float(), FORMS[x_format])
    size = x.shape[1] // 2 if x_format == "mxfp4" else x.shape[1]
    return planes.flatten(1)[:, :size].contiguous(), scale


def finalize(rows: Tensor, row_of_slot: Tensor, topk_weights: Tensor) -> Tensor:
    """Add up what ``torch.ops.mxfp4.moe_unfinalized`` returned: sum_j topk_weights[t, j] * rows[row_of_slot[t, j]].

    Shapes: rows [R, H] float32, bfloat16 or float16; row_of_slot [T, K] int32, -1 skips the slot whatever its weight
    holds; topk_weights [T, K] any float (ones where the weight went onto the input). Returns [T, H] in rows' dtype; the
    sum is float32, slot after slot.
    Raises: ValueError for shapes that differ and, on a CPU, for a row out of range; TypeError for dtypes.
    """
    return torch.ops.mxfp4.finalize(rows, row_of_slot, topk_weights)


def localise(topk_ids: Tensor, expert_ids: Tensor) -> Tensor:
    """Translate global expert numbers to rows of this shard, or -1.

    Shapes: topk_ids [...] int32 or int64; expert_ids [E] int32, the global number of each row, any order, no repeats.
    Returns [...] in topk_ids' dtype. Raises ValueError for ids below -1 and for repeats (CPU tensors).
    """
    return torch.ops.mxfp4.localise(topk_ids, expert_ids)


def route(
    logits: Tensor,
    top_k: int,
    method: str = "softmax_topk",
    *,
    correction_bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    hash_table: Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts for each token, and weigh them, in float32.

    Shapes: logits [T, E]; correction_bias [E]; input_ids [T]; hash_table [vocabulary, top_k]. Returns topk_ids
    [T, top_k] int32 and topk_weights [T, top_k] float32.
    Dtypes: logits and correction_bias any float, rounded to float32 first; input_ids and hash_table int32 or int64.
    Methods, and the models that have them:
    "softmax_topk": scores are a softmax over all experts (Mixtral, Qwen3; with a bias Ernie 4.5, LongCat-Flash; with
    groups DeepSeek-V2). "topk_softmax": a softmax over the chosen logits (gpt-oss). "sigmoid_topk": sigmoids
    (DeepSeek-V3, MiniMax-M2). "topk_sigmoid": the same, never renormalized (Llama 4). "sqrtsoftplus_topk":
    sqrt(log(1 + exp(logit))) (DeepSeek-V4).
    Choice: the highest scores, or scores + correction_bias, best first. groups > 1 cuts the experts into groups of
    neighbours and chooses only from the topk_groups best ones; a group counts as its best expert, with a
    correction_bias as the sum of its two best (both as in DeepSeek's code). hash_table chooses by input_ids instead,
    in the table's order (the first layers of DeepSeek-V4: ``tid2eid``; vLLM: ``hash_indices_table``).
    Weights: the scores without the bias; renormalize divides them by their sum; scale multiplies them. A sum of 0
    (scores that underflowed, or logits that are all -Inf) leaves weights of 0.
    Ties: the lower index comes first, of experts and of groups. Without a bias the logits are compared, so different
    logits never tie. A NaN is chosen like -Inf, and makes all weights of its token NaN (with hash_table: if it is
    chosen); ids are distinct experts all the same. +Inf gives NaN weights with a softmax and where it is divided by
    itself. All devices and kernels give the same bits.
    Raises: ValueError for an unknown method, sizes that do not fit, and arguments that the method does not use; on a
    CPU for input_ids and hash_table out of range (elsewhere such a slot is -1 with weight 0). TypeError for dtypes.
    """
    tensors = (logits, correction_bias, input_ids, hash_table)
    options: dict[str, Any] = {
        "method": method, "groups": groups, "topk_groups": topk_groups, "renormalize": renormalize, "scale": scale,
    }  # fmt: skip
    if unobserved(*tensors):
        return route_kernel(*tensors, top_k, **options)
    ids, weights = torch.ops.mxfp4.route(*tensors, top_k, **options)
    return ids, weights
