"""The backends, in the order in which they are asked. Order is meaning: each line says what put it where it stands."""

from __future__ import annotations

from . import native_cpu, reference
from .base import Backend, Tolerance

BACKENDS: tuple[Backend, ...] = (
    native_cpu.BACKEND,  # the only kernels for a CPU; benchmarks/results has their times beside a torch loop
    reference.BACKEND,  # always right, always last
)

__all__ = ["BACKENDS", "Backend", "Tolerance"]
