"""Load the compiled libraries, or record in a sentence why one is absent. Nothing here fails the import of the
package."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent


@functools.lru_cache(maxsize=1)
def load_cpu() -> str | None:
    """Load ``_C_cpu.so`` once. Returns None, or the reason why the native CPU kernels are absent.

    The schemas of the leaf ops must be defined before: ``_ops`` calls this at its end.
    """
    path = FOLDER / "_C_cpu.so"
    if not path.exists():
        return "the compiled CPU library is absent (installed with MXFP4_BUILD=none, or not built)"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"the compiled CPU library {path} does not load: {error}"
    return None


@functools.lru_cache(maxsize=1)
def cpu_isa() -> str:
    """Name the instruction set that the native CPU kernels use here; ``torch`` when there are none.

    Raises RuntimeError, listing what this CPU has, when MXFP4_CPU_ISA names another one.
    """
    return "torch" if load_cpu() else str(torch.ops.mxfp4._native_cpu_isa())


def runs_native(x: Tensor) -> bool:
    """Whether the compiled leaves run on x's device."""
    return x.device.type == "cpu" and cpu_isa() != "torch"  # an error here, should MXFP4_CPU_ISA be wrong
