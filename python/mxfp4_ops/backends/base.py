"""What a backend is, and the reasons that many backends share. A reason is a sentence; no reason means supported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..activation import Resolved
from ..errors import dtype_name
from ..layout import Layout
from ..problem import MoEProblem

Packed = Mapping[str, "Tensor | None"]


class Run(Protocol):
    """Compute the layer. ``ids`` [T, K] int32 or int64 are rows of the packed tensors or -1; ``weights`` [T, K] is any
    float; ``x_scale`` comes with x that is quantized already, in the form ``x_format``.

    Returns [T, hidden] in x's dtype (bfloat16 for quantized x), contiguous, its own storage. No host read of device
    data, no memory but torch's.
    """

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        packed: Packed,
        activation: Resolved,
        *,
        hidden: int,
        intermediate: int,
        x_format: str,
        x_scale: Tensor | None,
        weight_on_input: bool,
        batch_invariant: bool,
    ) -> Tensor: ...


# What a form of x adds on its own: relative L2 against float64 on unrounded x, normal data of gpt-oss sizes.
_X_FORMAT_ERRORS = {
    "none": 0.0,
    "int15": 0.0,
    "fp8x2": 3e-3,
    "int8": 1.25e-2,
    "fp8": 5.5e-2,
    "fp8_row": 5.5e-2,
    "mxfp8": 5.5e-2,
    "mxfp4": 0.2,
}


@dataclass(frozen=True)
class Tolerance:
    """Largest relative L2 error against float64 on dequantized weights, by the dtype of x; one row may have three
    times it."""

    float32: float = 1e-5
    bfloat16: float = 2.6e-3
    float16: float = 2.0e-3
    worst_row: float = 3.0

    def of(self, dtype: torch.dtype, x_format: str = "none") -> float:
        return max(float(getattr(self, dtype_name(dtype))), _X_FORMAT_ERRORS[x_format])


@dataclass(frozen=True)
class Backend:
    """A layout and the function that runs it. Frozen and without state: the choice among backends lies in the layout's
    tag."""

    name: str  # for people and for prefer=
    layout: Layout
    why_not: Callable[[MoEProblem], Iterator[str]]  # yields complete sentences; nothing yielded: supported
    run: Run
    tolerance: Tolerance = Tolerance()
    # run() raises RuntimeError, before any work, for ids outside -1..E-1 and for every tensor that the op's checks
    # would refuse or convert. The op then calls it first, and checks in Python only what it refused.
    checks_inputs: bool = False
    # run() only calls aten ops and compiled ops, which check their inputs, and reads no data: traced, it is what an
    # exported program holds in place of ``moe``, and such a program runs without Python (``export.lower``).
    lowers: bool = False
    slow: str = ""  # what it costs to land here: select() warns once with this text


def need_arch(problem: MoEProblem, *prefixes: str) -> Iterator[str]:
    """Yield a reason unless the chip's name starts with one of ``prefixes``."""
    if not problem.arch.startswith(prefixes):
        yield f"needs {' or '.join(prefixes)}, this device is {problem.arch}"


def need_activation(problem: MoEProblem, *names: str) -> Iterator[str]:
    """Yield a reason unless the activation is one of ``names``."""
    if problem.activation.name not in names:
        yield f"computes {', '.join(names)} only, got activation {problem.activation.name!r}"


def need_x_format(problem: MoEProblem, *names: str) -> Iterator[str]:
    """Yield a reason unless x enters the products in one of the forms ``names``."""
    if problem.x_format not in names:
        yield f"multiplies x_format {' or '.join(map(repr, names))} only, got {problem.x_format!r}"
