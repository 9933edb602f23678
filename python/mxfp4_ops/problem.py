"""What must be computed, on what chip: the one value that a backend is asked about before any weight is touched."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ._extension import cpu_isa
from .activation import Activation, resolve
from .errors import dtype_name, need, need_type
from .format import FLOAT_DTYPES, need_blocks
from .x_formats import X_FORMATS


def arch_of(device: torch.device | str) -> str:
    """Name the chip as its vendor does: ``sm_90``, ``gfx950``; for a CPU ``cpu_avx512_vnni``, ``cpu_avx2``,
    ``cpu_scalar``."""
    device = torch.device(device)
    if device.type == "cpu":
        return f"cpu_{cpu_isa()}"
    if device.type == "cuda" and torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return device.type


@dataclass(frozen=True)
class MoEProblem:
    """A mixture-of-experts layer as its backend must see it. Sizes are logical, in elements.

    ``arch`` is what ``arch_of(device)`` returns; ``experts`` counts the experts held here (a shard's own);
    ``x_dtype`` is the dtype of x and of the result.
    """

    arch: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int = 1
    x_dtype: torch.dtype = torch.bfloat16
    x_format: str = "none"
    activation: Activation = field(default_factory=Activation)
    bias: bool = False
    weight_on_input: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        op = "MoEProblem"
        need_blocks(op, "hidden", self.hidden)
        need_blocks(op, "intermediate", self.intermediate)
        need(self.experts > 0, lambda: f"{op}: experts must be positive, got {self.experts}.")
        need(self.top_k > 0, lambda: f"{op}: top_k must be positive, got {self.top_k}.")
        need_type(
            self.x_dtype in FLOAT_DTYPES,
            lambda: f"{op}: x_dtype must be float32, bfloat16 or float16, got {dtype_name(self.x_dtype)}.",
        )
        need(
            self.x_format in X_FORMATS,
            lambda: f"{op}: x_format must be one of {', '.join(X_FORMATS)}, got {self.x_format!r}.",
        )
        resolve(op, self.activation.name, self.activation.alpha, self.activation.beta, self.activation.limit)

    def __str__(self) -> str:
        act = self.activation
        shown = {
            "arch": self.arch,
            "experts": self.experts,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "top_k": self.top_k,
            "x_dtype": dtype_name(self.x_dtype),
            "x_format": self.x_format,
            "activation": act.name,
            **{k: getattr(act, k) for k in ("alpha", "beta", "limit") if getattr(act, k) is not None},
            "bias": self.bias,
            "weight_on_input": self.weight_on_input,
            "batch_invariant": self.batch_invariant,
        }
        return ", ".join(f"{k}={v}" for k, v in shown.items())
