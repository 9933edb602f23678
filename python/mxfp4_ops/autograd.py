"""Gradients of the ops. None exists yet, and torch by itself would leave a gradient of None and say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ._ops import LIBRARY

# Every op with a float output that depends on a float input. The leaves have none: the ops call them when nothing is to
# be recorded, and an autograd kernel in Python would cost a decode step 0.1 ms.
_WITHOUT_BACKWARD = ("moe", "route", "qdq", "prepare_moe", "unprepare_moe")


def _no_backward(name: str) -> Callable[..., NoReturn]:
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(
            f"mxfp4::{name}: backward is not implemented. Detach the inputs, or call it under torch.no_grad()."
        )

    return backward


for _name in _WITHOUT_BACKWARD:
    torch.library.register_autograd(f"mxfp4::{_name}", _no_backward(_name), lib=LIBRARY)
