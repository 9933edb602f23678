"""Gradients of the ops: a formula, or an error that names the op. torch by itself would leave None and say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._ops import LIBRARY
from .errors import need
from .route_gradient import route_backward

# Ops with a float output that depends on a float input, and no formula for it. The leaves are not among them: the ops
# call them when nothing is to be recorded, and an autograd kernel in Python would cost a decode step 0.1 ms.
_WITHOUT_BACKWARD = ("moe_backward", "moe_unfinalized", "finalize", "prepare_moe", "unprepare_moe")

_MOE_INPUTS = tuple(a.name for a in torch.ops.mxfp4.moe.default._schema.arguments if not a.kwarg_only)
_MOE_DIFFERENTIABLE = ("x", "topk_weights", "w13_bias", "w2_bias")  # in the order of moe_backward's results
_AUX = _MOE_INPUTS.index("aux")


def _no_backward(name: str) -> Callable[..., NoReturn]:
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(
            f"mxfp4::{name}: backward is not implemented. Detach the inputs, or call it under torch.no_grad()."
        )

    return backward


def _moe_setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_AUX], *inputs[_AUX + 1 :], *(inputs[_AUX] or ()))
    ctx.options = keyword_only_inputs


def _moe_backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    needed = dict(zip(_MOE_INPUTS, ctx.needs_input_grad, strict=False))  # arguments left at None are not among them
    by_aux = needed["aux"]
    needed["aux"] = any(by_aux) if isinstance(by_aux, (list, tuple)) else False  # None, or empty: nothing to need
    frozen = [name for name, state in needed.items() if state and name not in _MOE_DIFFERENTIABLE]
    need(
        not frozen,
        lambda: f"mxfp4::moe: {frozen[0]} must not require a gradient, since packed experts are frozen. Detach it.",
    )
    others = len(_MOE_INPUTS) - 1
    saved = ctx.saved_tensors
    inputs = (*saved[:_AUX], list(saved[others:]), *saved[_AUX:others])
    mask = [needed[name] for name in _MOE_DIFFERENTIABLE]
    found = torch.ops.mxfp4.moe_backward(grad_output, *inputs, output_mask=mask, **ctx.options)
    gradients = {name: g for name, g, wanted in zip(_MOE_DIFFERENTIABLE, found, mask, strict=True) if wanted}
    nothing = [None] * len(saved[others:]) if isinstance(by_aux, (list, tuple)) else None
    return tuple(nothing if name == "aux" else gradients.get(name) for name in needed)


def _qdq_backward(ctx: Any, grad_output: Tensor) -> Tensor:
    """Straight through: every element passes its gradient on, saturated ones and those of a NaN block too."""
    return grad_output


def _route_setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[0])
    ctx.options = {name: keyword_only_inputs[name] for name in ("method", "renormalize", "scale")}


def _route_backward(ctx: Any, _: Any, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
    """By the logits alone: the correction bias chooses and is no part of a weight, so its gradient is zero."""
    logits, correction_bias, ids = ctx.saved_tensors
    needs_logits, needs_bias, *rest = ctx.needs_input_grad
    by_logits = route_backward(grad_weights, logits, ids, **ctx.options) if needs_logits else None
    by_bias = torch.zeros_like(correction_bias) if needs_bias else None
    return by_logits, by_bias, *[None] * len(rest)


def _register() -> None:
    for name in _WITHOUT_BACKWARD:
        torch.library.register_autograd(f"mxfp4::{name}", _no_backward(name), lib=LIBRARY)
    torch.library.register_autograd("mxfp4::moe", _moe_backward, setup_context=_moe_setup, lib=LIBRARY)
    torch.library.register_autograd("mxfp4::qdq", _qdq_backward, lib=LIBRARY)
    torch.library.register_autograd("mxfp4::route", _route_backward, setup_context=_route_setup, lib=LIBRARY)


_register()
