"""Checks of what comes with tokens: x and its quantized forms, ids, routing weights, gradients.

As in ``checks.py`` nothing branches on the number of tokens. The functions that say so read data, on a CPU only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from .argument_checks import cpu_extremes, need_device, need_dims, need_dtype, need_float, need_shape
from .errors import need
from .format import FLOAT_DTYPES, need_blocks
from .layout import BIASES
from .x_formats import FORMS, X_FORMATS, XFormat

_ID_DTYPES = (torch.int32, torch.int64)


def x_format(op: str, name: str) -> None:
    need(name in X_FORMATS, lambda: f"{op}: x_format must be one of {', '.join(X_FORMATS)}, got {name!r}.")


def x_dtype(op: str, x: Tensor) -> None:
    need_dtype(op, "x", x, FLOAT_DTYPES)


def quantized_x(op: str, x: Tensor, scale: Tensor, name: str) -> None:
    """x and x_scale where x comes quantized: the form must allow it, and the dtypes be those of the form."""
    x_format(op, name)
    form = FORMS.get(name)
    dtypes = () if form is None else form.x_dtypes
    need(bool(dtypes), lambda: f"{op}: x_scale must be None for x_format {name!r}, which takes x in its own dtype.")
    need_dtype(op, "x", x, dtypes)
    need_dtype(op, "x_scale", scale, cast(XFormat, form).scale_dtypes)


def quant_x(op: str, x: Tensor, name: str) -> None:
    known = [n for n, form in FORMS.items() if form.x_dtypes]
    need(name in known, lambda: f"{op}: x_format must be one of {', '.join(known)}, got {name!r}.")
    x_dtype(op, x)
    need_dims(op, "x", x, 2, "[T, H]")
    need_blocks(op, "H, the last dimension of x,", x.shape[1])


def x_scale(op: str, scale: Tensor, x: Tensor, name: str, hidden: int) -> None:
    scales = FORMS[name].scales_of(hidden)
    need_device(op, "x_scale", scale, x)
    need(
        scale.shape == (x.shape[0], scales),
        lambda: (
            f"{op}: x_scale must be [T, {scales}] with T = {x.shape[0]} for x_format {name!r} and H = {hidden}, "
            f"got {list(scale.shape)}."
        ),
    )


def moe_inputs(op: str, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, hidden: int, *, packed: bool) -> None:
    """``packed``: two elements of x lie in a byte."""
    label, columns = ("[T, H/2]", hidden // 2) if packed else ("[T, H]", hidden)
    need(
        x.dim() == 2 and bool(x.shape[1] == columns),
        lambda: f"{op}: x must be {label} with H = hidden = {hidden}, got {list(x.shape)}.",
    )
    need_dtype(op, "topk_ids", topk_ids, _ID_DTYPES)
    need_float(op, "topk_weights", topk_weights)
    _per_token(op, "topk_ids", topk_ids, x)
    _per_token(op, "topk_weights", topk_weights, x)
    need(
        topk_weights.shape[1] == topk_ids.shape[1],
        lambda: (
            f"{op}: topk_weights must have the K = {topk_ids.shape[1]} of topk_ids, got {list(topk_weights.shape)}."
        ),
    )
    need(topk_ids.shape[1] > 0, lambda: f"{op}: topk_ids must have at least one column, got {list(topk_ids.shape)}.")


def moe_backward(
    op: str, grad_output: Tensor, x: Tensor, output_mask: Sequence[bool], weights: Mapping[str, Tensor | None]
) -> None:
    """Check what the backward has beside the arguments of ``moe``."""
    need_dtype(op, "grad_output", grad_output, (x.dtype,))
    need_shape(op, "grad_output", grad_output, x.shape, "[T, H] as x")
    need_device(op, "grad_output", grad_output, x)
    need(len(output_mask) == 4, lambda: f"{op}: output_mask must have 4 entries, got {len(output_mask)}.")
    absent = [n for n, wanted in zip(BIASES, output_mask[2:], strict=True) if wanted and weights[n] is None]
    need(not absent, lambda: f"{op}: output_mask must be False for {absent[0]}, which is None.")


def _per_token(op: str, name: str, tensor: Tensor, x: Tensor) -> None:
    need_dims(op, name, tensor, 2, "[T, K]")
    need(
        tensor.shape[0] == x.shape[0],
        lambda: f"{op}: {name} must be [T, K] with T = {x.shape[0]} as in x, got {list(tensor.shape)}.",
    )
    need_device(op, name, tensor, x)


def expert_ids(op: str, ids: Tensor, experts: int | torch.SymInt | None, like: Tensor) -> None:
    need_dtype(op, "expert_ids", ids, (torch.int32,))
    need_dims(op, "expert_ids", ids, 1, "[E]")
    if experts is not None:
        need(
            ids.shape[0] == experts,
            lambda: f"{op}: expert_ids must name one expert for each of the {experts} in w13, got {ids.shape[0]}.",
        )
    need_device(op, "expert_ids", ids, like)


def topk_ids(op: str, ids: Tensor) -> None:
    need_dtype(op, "topk_ids", ids, _ID_DTYPES)


def id_values(op: str, ids: Tensor, experts: int | None) -> None:
    """Refuse an id outside -1..E-1, on a CPU; None stands for no upper bound."""
    low, high = cpu_extremes(ids)
    need(low >= -1, lambda: f"{op}: topk_ids must be -1 (skip) or an expert, got {low}.")
    if experts is not None:
        need(high < experts, lambda: f"{op}: topk_ids must be below the number of experts E = {experts}, got {high}.")


def row_values(op: str, places: Tensor, rows: int) -> None:
    """Refuse a place outside -1..R-1, on a CPU."""
    low, high = cpu_extremes(places)
    need(
        low >= -1 and high < rows,
        lambda: f"{op}: row_of_slot must be -1 (skip) or a row below R = {rows}, got {low if low < -1 else high}.",
    )


def finalize(op: str, rows: Tensor, row_of_slot: Tensor, topk_weights: Tensor) -> None:
    need_dtype(op, "rows", rows, FLOAT_DTYPES)
    need_dims(op, "rows", rows, 2, "[R, H]")
    need_dtype(op, "row_of_slot", row_of_slot, (torch.int32,))
    need_dims(op, "row_of_slot", row_of_slot, 2, "[T, K]")
    need_float(op, "topk_weights", topk_weights)
    need_shape(op, "topk_weights", topk_weights, row_of_slot.shape, "the shape of row_of_slot")
    need_device(op, "row_of_slot", row_of_slot, rows, "rows'")
    need_device(op, "topk_weights", topk_weights, rows, "rows'")


def expert_numbers(op: str, ids: Tensor) -> None:
    """Refuse an expert named twice, which would count twice in a sum over ranks, and a negative number, which a skipped
    slot would find. CPU tensors only."""
    if ids.device.type != "cpu":
        return
    values = ids.sort().values
    least = 0 if values.numel() == 0 else int(values[0])
    need(least >= 0, lambda: f"{op}: expert_ids must be expert numbers from 0 on, got {least}.")
    twice = values[1:][values[1:] == values[:-1]].tolist()
    need(not twice, lambda: f"{op}: expert_ids must not repeat, got {twice[0]} more than once.")


def input_scales(op: str, scales: Mapping[str, Tensor], w13: Tensor) -> None:
    """The scales of x_format "fp8_static" by name; other forms have none."""
    for name, scale in scales.items():
        need_dtype(op, name, scale, (torch.float32,))
        need_shape(op, name, scale, (w13.shape[0],), "[E]")
        need_device(op, name, scale, w13, "w13's")
