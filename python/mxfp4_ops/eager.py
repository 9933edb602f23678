"""Whether a call would reach its kernel straight away: nothing compiles, traces, transforms, records or differentiates.

Then the kernel may be called without the dispatcher, which takes the 22 arguments of ``moe`` to C++ and back: 0.2 of
2.8 ms for one token of gpt-oss on two cores, where the weights have pushed all else out of the caches. For the same
reason the question itself touches as little as it can.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _plain_keys() -> tuple[int, int]:
    """The dispatch keys that torch gives a thread in which no mode is active; the second in inference mode."""
    inference = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    return inference.add(torch._C.DispatchKey.ADInplaceOrView).raw_repr(), inference.raw_repr()


try:
    _thread_keys = torch._C._dispatch_tls_local_include_set
    _PLAIN_KEYS: tuple[int, ...] = _plain_keys()
except AttributeError:  # a torch that moved these private names: everything goes through the dispatcher
    _PLAIN_KEYS = ()


def unobserved(*tensors: Tensor | None) -> bool:
    """True when all tensors are of a plain type, none needs a gradient, and no mode or transform is active.

    Modes and transforms show in the keys of the thread, whatever tensors they have wrapped.
    """
    if torch.compiler.is_compiling() or not _PLAIN_KEYS or _thread_keys().raw_repr() not in _PLAIN_KEYS:
        return False
    given = [t for t in tensors if t is not None]
    if not all([type(t) in _PLAIN_TYPES for t in given]):
        return False
    return not (torch.is_grad_enabled() and any([t.requires_grad for t in given]))
