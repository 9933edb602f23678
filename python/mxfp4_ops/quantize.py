"""Dense experts to MXFP4: the way back from a fine-tune in bfloat16 to the form that checkpoints hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks
from .argument_checks import need_float, need_shape, need_tensor
from .errors import dtype_name, need, need_type
from .experts import ExpertWeights
from .format import BLOCK, FLOAT_DTYPES, need_blocks

_OP = "mxfp4_ops.quantize_experts"
_ORDERS = ("out_in", "in_out")


def quantize_experts(
    w13: Tensor | Sequence[Tensor],
    w2: Tensor | Sequence[Tensor],
    *,
    order: str,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    scale_rule: str = "even",
) -> ExpertWeights:
    """Round dense experts to MXFP4, expert by expert; values that are MXFP4 already come back with zero error.

    Shapes: order "out_in": w13 [E, S*I, H], w2 [E, H, I], as nn.Linear holds weights; order "in_out": w13 [E, H, S*I],
    w2 [E, I, H], as transformers holds gpt-oss. Blocks of 32 lie along IN either way. Rows of w13 keep their order:
    where gate and up rows take turns here they do so in the result, which ``prepare(..., interleaved=True)`` takes.
    A stack may also be a sequence of E matrices, each asked for when its turn comes: one that loads them on request
    keeps one in memory. Biases [E, S*I] and [E, H] of any float dtype are handed on as they are.
    Dtypes: float32, bfloat16, float16. scale_rule: as for ``quant_mxfp4``; "mse" rounds with the least error.
    The peak of memory is the result plus a copy of one expert; rules that run in plain torch take some float32 copies.
    Raises: ValueError for shapes that do not fit together, an unknown order or rule; TypeError for other dtypes.
    """
    need(order in _ORDERS, lambda: f"{_OP}: order must be one of {', '.join(_ORDERS)}, got {order!r}.")
    checks.scale_rule(_OP, scale_rule)
    _stack("w13", w13)
    _stack("w2", w2)
    need(len(w13) > 0, lambda: f"{_OP}: w13 must hold at least one expert, got none.")
    need(len(w2) == len(w13), lambda: f"{_OP}: w2 must hold as many experts as w13, {len(w13)}, got {len(w2)}.")
    first = _matrix("w13", w13[0], order)
    (rows, hidden), device = first.shape, first.device
    del first  # a sequence may load its matrices one by one
    out, intermediate = _matrix("w2", w2[0], order).shape
    need_blocks(_OP, "hidden (IN of w13)", hidden)
    need_blocks(_OP, "intermediate (IN of w2)", intermediate)
    need(
        rows in (intermediate, 2 * intermediate),
        lambda: f"{_OP}: w13 must have I = {intermediate} or 2 I = {2 * intermediate} as OUT, got {rows}.",
    )
    need(out == hidden, lambda: f"{_OP}: w2 must have H = {hidden}, the IN of w13, as OUT, got {out}.")
    _bias("w13_bias", w13_bias, (len(w13), rows), device)
    _bias("w2_bias", w2_bias, (len(w2), hidden), device)
    w13_codes, w13_scales = _quantize("w13", w13, order, (rows, hidden), device, scale_rule)
    w2_codes, w2_scales = _quantize("w2", w2, order, (hidden, intermediate), device, scale_rule)
    return ExpertWeights(w13_codes, w13_scales, w13_bias, w2_codes, w2_scales, w2_bias)


def _stack(name: str, stack: object) -> None:
    scalar = isinstance(stack, Tensor) and stack.dim() == 0
    got = "a scalar" if scalar else type(stack).__name__
    need_type(
        hasattr(stack, "__getitem__") and not scalar,
        lambda: f"{_OP}: {name} must be a tensor [E, ...] or a sequence of matrices, got {got}.",
    )


def _matrix(name: str, expert: Tensor, order: str) -> Tensor:
    """One expert as [OUT, IN], a view."""
    need_tensor(_OP, name, expert)
    need_type(
        expert.dtype in FLOAT_DTYPES,
        lambda: f"{_OP}: {name} must be float32, bfloat16 or float16, got {dtype_name(expert.dtype)}.",
    )
    need(
        expert.dim() == 2,
        lambda: (
            f"{_OP}: {name} must hold a matrix [{order.upper().replace('_', ', ')}] for each expert, got "
            f"{list(expert.shape)}."
        ),
    )
    return expert.detach() if order == "out_in" else expert.detach().T


def _bias(name: str, bias: Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    if bias is not None:
        need_float(_OP, name, bias)
        need_shape(_OP, name, bias, shape, "[E, OUT]")
        _on_device(name, bias, device)


def _on_device(name: str, tensor: Tensor, device: torch.device) -> None:
    need(
        tensor.device == device,
        lambda: f"{_OP}: {name} must be on the device of w13's expert 0, {device}, got {tensor.device}.",
    )


def _quantize(
    name: str,
    stack: Tensor | Sequence[Tensor],
    order: str,
    shape: tuple[int, int],
    device: torch.device,
    scale_rule: str,
) -> tuple[Tensor, Tensor]:
    """Quantize a stack into tensors that are allocated once."""
    codes = torch.empty(len(stack), shape[0], shape[1] // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(len(stack), shape[0], shape[1] // BLOCK, dtype=torch.uint8, device=device)
    for e in range(len(stack)):
        matrix = _matrix(name, stack[e], order)
        _same_shape(name, matrix, shape, e)
        _on_device(name, matrix, device)
        codes[e], scales[e] = torch.ops.mxfp4.quant(matrix, scale_rule=scale_rule)
    return codes, scales


def _same_shape(name: str, matrix: Tensor, shape: tuple[int, int], expert: int) -> None:
    need(
        matrix.shape == shape,
        lambda: (
            f"{_OP}: {name} must have the shape of expert 0, (OUT, IN) = {shape}, in all experts, got "
            f"{tuple(matrix.shape)} in expert {expert}."
        ),
    )
