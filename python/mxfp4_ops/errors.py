"""The two ways to refuse: a sentence for a bad argument, a list of reasons for a problem that no backend can run."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Unsupported(NotImplementedError):
    """No backend, or not the one that was asked for, can run this problem. The message holds every reason."""


def need(ok: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Raise ValueError with ``message()`` unless ``ok``.

    A true plain bool returns at once (0.1 us; ``torch._check_value`` takes 3 us). A false or symbolic one goes through
    torch, so that the sentence reaches the user of ``torch.compile`` without a traceback of fake-tensor internals.
    """
    if ok is not True:
        torch._check_value(ok, message)


def need_type(ok: bool, message: Callable[[], str]) -> None:
    """Raise TypeError with ``message()`` unless ``ok``: for dtypes and for the wrong kind of object."""
    if ok is not True:
        torch._check_type(ok, message)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``: messages name dtypes as users write them."""
    return str(dtype).removeprefix("torch.")
