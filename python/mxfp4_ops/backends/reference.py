"""Canonical rows in plain torch: runs on any device, the definition of the result, slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from .. import reference
from ..activation import Resolved
from ..layout import Layout, canonical_specs
from ..problem import MoEProblem
from .base import Backend, Packed


def _as_is(tensors: Mapping[str, Tensor], gated: bool) -> dict[str, Tensor]:
    return dict(tensors)


def _why_not(problem: MoEProblem) -> Iterator[str]:
    yield from ()  # whatever a MoEProblem may say


def _run(
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
) -> Tensor:
    by_name: dict[str, Any] = dict(packed)  # the six, and the input scales where x_format has them
    return reference.moe(
        x,
        ids,
        weights,
        **by_name,
        x_scale=x_scale,
        activation=activation,
        x_format=x_format,
        weight_on_input=weight_on_input,
        batch_invariant=batch_invariant,
    )


BACKEND = Backend(
    "reference",
    Layout("canonical", 32, 32, canonical_specs, _as_is, _as_is),
    _why_not,
    _run,
    slow="every expert is expanded to float32 at each call, some hundred times slower than a kernel; "
    "mxfp4_ops.explain(problem) says what each faster backend lacks",
)
