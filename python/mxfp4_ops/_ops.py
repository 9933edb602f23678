"""Kernel and fake of every op; the schemas stand in ``_schemas.py``, the checks in ``checks.py``, the gradients in
``autograd.py``.

A public op is one Python kernel for every device (CompositeExplicitAutograd): check, then the compiled leaf of the
device where there is one, else plain torch. The fake runs the same check, so a traced call is refused by the same
sentence. The Python layer costs some 10 us a call, and nothing under CUDA graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _schemas, checks, format, packing, quant_modes
from ._extension import cpu_isa, runs_native
from .activation import resolve
from .argument_checks import need_contiguous, need_tensor
from .backends import Backend
from .dispatch import backend_of
from .format import BLOCK, FLOAT_DTYPES, as_bytes
from .layout import BIASES, SLOTS, canonical_specs, packed_specs
from .moe_backward import moe_backward, moe_backward_fake
from .moe_call import localise, localise_fake, moe, moe_fake, moe_out, moe_out_fake
from .quant_modes import QUANT_MODES
from .route_call import native_route_fake, route_fake, route_kernel
from .unfinalized import finalize, finalize_fake, moe_unfinalized, moe_unfinalized_fake

_PIECE = 1 << 18  # elements that dequant.out expands at once in plain torch

LIBRARY = torch.library.Library("mxfp4", "DEF")


# --- quant, dequant, qdq ----------------------------------------------------------------------------------------------


def _quant_fake(x: Tensor, *, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    checks.quant("mxfp4::quant", x, scale_rule)
    return _native_quant_fake(x, 0)


def _quant(x: Tensor, *, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    checks.quant("mxfp4::quant", x, scale_rule)
    native = QUANT_MODES[scale_rule].native
    if native is not None and runs_native(x):
        return torch.ops.mxfp4._native_quant(x.contiguous(), native)
    return quant_modes.quant(x.contiguous(), scale_rule)


def _dequant_fake(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    dtype = torch.bfloat16 if dtype is None else dtype
    checks.dequant("mxfp4::dequant", blocks, scales, dtype)
    return _native_dequant_fake(blocks, scales, FLOAT_DTYPES.index(dtype))


def _dequant(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    dtype = torch.bfloat16 if dtype is None else dtype
    checks.dequant("mxfp4::dequant", blocks, scales, dtype)
    blocks, scales = as_bytes(blocks).contiguous(), as_bytes(scales).contiguous()
    if runs_native(blocks):
        return torch.ops.mxfp4._native_dequant(blocks, scales, FLOAT_DTYPES.index(dtype))
    return format.dequant(blocks, scales, dtype)


def _check_dequant_out(blocks: Tensor, scales: Tensor, dtype: torch.dtype | None, out: Tensor) -> None:
    op = "mxfp4::dequant.out"
    need_tensor(op, "out", out)
    wanted = out.dtype if dtype is None else dtype
    checks.dequant(op, blocks, scales, wanted)
    checks.out(op, out, (*blocks.shape[:-1], blocks.shape[-1] * 2), wanted, blocks)
    need_contiguous(op, "out", out, "It is written in place.")
    checks.no_gradient(op, out)


def _dequant_out_fake(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype | None = None, out: Tensor) -> None:
    _check_dequant_out(blocks, scales, dtype, out)


def _dequant_out(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype | None = None, out: Tensor) -> None:
    """No other memory of out's size is taken (rule M3): plain torch goes over it in pieces."""
    _check_dequant_out(blocks, scales, dtype, out)
    blocks, scales = as_bytes(blocks).contiguous(), as_bytes(scales).contiguous()
    if runs_native(blocks):
        torch.ops.mxfp4._native_dequant_out(blocks, scales, out)
        return
    pieces = (t.view(-1).split(n) for t, n in ((blocks, _PIECE // 2), (scales, _PIECE // BLOCK), (out, _PIECE)))
    for codes, bytes_, values in zip(*pieces, strict=True):
        values.copy_(format.dequant(codes, bytes_, out.dtype))


def _qdq_fake(x: Tensor, *, scale_rule: str = "even") -> Tensor:
    checks.quant("mxfp4::qdq", x, scale_rule)
    return x.new_empty(x.shape)


def _qdq(x: Tensor, *, scale_rule: str = "even") -> Tensor:
    checks.quant("mxfp4::qdq", x, scale_rule)
    native = QUANT_MODES[scale_rule].native
    if native is not None and runs_native(x):
        return torch.ops.mxfp4._native_qdq(x.contiguous(), native)
    return quant_modes.qdq(x.contiguous(), scale_rule)


# --- prepare_moe, unprepare_moe, repack_expert ------------------------------------------------------------------------


@dataclass(slots=True)
class _PrepareCall:
    """The arguments that ``prepare_moe`` and ``repack_expert`` share, in the schema's order."""

    w13: Tensor
    w13_scale: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_bias: Tensor | None
    layout: str = ""
    interleaved: bool = False
    activation: str = "silu"
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None

    def check(self, op: str, *, one: bool = False) -> tuple[Backend, bool, dict[str, Tensor]]:
        """Refuse bad arguments; return the layout's owner, whether w13 has two halves, and the weights as a stack."""
        backend = backend_of(op, self.layout)
        gated = resolve(op, self.activation, self.alpha, self.beta, self.limit).gated
        checks.interleaved(op, self.interleaved, gated=gated)
        weights = {slot: getattr(self, slot) for slot in SLOTS}
        weights = checks.one_expert_stack(op, weights) if one else weights
        return backend, gated, checks.canonical(op, weights, gated=gated)


def _prepare_fake(*args: Any, **kwargs: Any) -> list[Tensor]:
    backend, gated, weights = _PrepareCall(*args, **kwargs).check("mxfp4::prepare_moe")
    w2 = weights["w2"]
    specs = packed_specs(backend.layout, int(w2.shape[1]), int(w2.shape[2]) * 2, gated)
    return list(packing.allocate(specs, weights, w2.shape[0]).values())


def _prepare_moe(*args: Any, **kwargs: Any) -> list[Tensor]:
    call = _PrepareCall(*args, **kwargs)
    backend, gated, weights = call.check("mxfp4::prepare_moe")
    return packing.pack(weights, backend.layout, gated=gated, interleaved=call.interleaved)


def _unprepare_fake(
    packed: Sequence[Tensor], *, layout: str, hidden: int, intermediate: int, gated: bool = True
) -> list[Tensor]:
    op = "mxfp4::unprepare_moe"
    held = checks.packed_list(op, packed, backend_of(op, layout), hidden, intermediate, gated=gated)
    present = {n: t for n, t in held.items() if n not in BIASES or t.shape[1] > 0}
    out = packing.allocate(canonical_specs(hidden, intermediate, gated), present, packed[0].shape[0])
    return [out[name] for name in SLOTS]


def _unprepare_moe(
    packed: Sequence[Tensor], *, layout: str, hidden: int, intermediate: int, gated: bool = True
) -> list[Tensor]:
    op = "mxfp4::unprepare_moe"
    backend = backend_of(op, layout)
    held = checks.packed_list(op, packed, backend, hidden, intermediate, gated=gated)
    return packing.unpack(held, backend.layout, hidden=hidden, intermediate=intermediate, gated=gated)


def _repack_check(
    call: _PrepareCall, packed: Sequence[Tensor], expert: int
) -> tuple[Backend, bool, dict[str, Tensor], dict[str, Tensor]]:
    op = "mxfp4::repack_expert"
    backend, gated, weights = call.check(op, one=True)
    sizes = (int(weights["w2"].shape[1]), int(weights["w2"].shape[2]) * 2)
    stacks = checks.packed_list(op, packed, backend, *sizes, gated=gated)
    checks.repack(op, stacks, expert, weights)
    return backend, gated, weights, stacks


def _repack_fake(packed: Sequence[Tensor], expert: int, *args: Any, **kwargs: Any) -> None:
    _repack_check(_PrepareCall(*args, **kwargs), packed, expert)


def _repack_expert(packed: Sequence[Tensor], expert: int, *args: Any, **kwargs: Any) -> None:
    call = _PrepareCall(*args, **kwargs)
    backend, gated, weights, stacks = _repack_check(call, packed, expert)
    packing.need_scale_bytes(weights, backend.layout)
    packing.pack_expert(stacks, expert, weights, 0, backend.layout, gated=gated, interleaved=call.interleaved)


# --- leaves: shapes only; the compiled library has the kernels --------------------------------------------------------


def _native_quant_fake(x: Tensor, scale_rule: int) -> tuple[Tensor, Tensor]:
    lead, n = x.shape[:-1], x.shape[-1]
    return x.new_empty(*lead, n // 2, dtype=torch.uint8), x.new_empty(*lead, n // BLOCK, dtype=torch.uint8)


def _native_dequant_fake(blocks: Tensor, scales: Tensor, dtype: int) -> Tensor:
    return blocks.new_empty(*blocks.shape[:-1], blocks.shape[-1] * 2, dtype=FLOAT_DTYPES[dtype])


def _native_dequant_out_fake(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """Nothing is returned."""


def _native_moe_fake(x: Tensor, *rest: Any) -> Tensor:
    # A real call with one tensor on the meta device is sent here, too: it would return memory as it was found.
    if any(t.device != x.device for t in rest if isinstance(t, Tensor)):
        raise RuntimeError("mxfp4_ops: the CPU kernels do not take this: devices")
    return x.new_empty(x.shape)


def _like_x_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


# --- aliases ----------------------------------------------------------------------------------------------------------


def _mxfp4_moe(*args: Any, **kwargs: Any) -> Tensor:
    return torch.ops.mxfp4.moe(*args, **kwargs)


def _dequant_mxfp4(x: Tensor, scale: Tensor, float_dtype: torch.dtype) -> Tensor:
    return torch.ops.mxfp4.dequant(x, scale, dtype=float_dtype)


def _qdq_mxfp4(x: Tensor, scale_calculation_mode: str = "even") -> Tensor:
    checks.scale_rule("mxfp4::qdq_mxfp4", scale_calculation_mode, "scale_calculation_mode")
    return torch.ops.mxfp4.qdq(x, scale_rule=scale_calculation_mode)


# --- registration -----------------------------------------------------------------------------------------------------

KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "moe": (moe, moe_fake),
    "moe.out": (moe_out, moe_out_fake),
    "moe_unfinalized": (moe_unfinalized, moe_unfinalized_fake),
    "finalize": (finalize, finalize_fake),
    "moe_backward": (moe_backward, moe_backward_fake),
    "route": (route_kernel, route_fake),
    "quant": (_quant, _quant_fake),
    "dequant": (_dequant, _dequant_fake),
    "dequant.out": (_dequant_out, _dequant_out_fake),
    "qdq": (_qdq, _qdq_fake),
    "prepare_moe": (_prepare_moe, _prepare_fake),
    "unprepare_moe": (_unprepare_moe, _unprepare_fake),
    "repack_expert": (_repack_expert, _repack_fake),
    "localise": (localise, localise_fake),
}
ALIASES: dict[str, Callable[..., Any]] = {
    "mxfp4_moe": _mxfp4_moe,
    "dequant_mxfp4": _dequant_mxfp4,
    "qdq_mxfp4": _qdq_mxfp4,
}
_LEAF_FAKES: dict[str, Callable[..., Any]] = {
    "_native_moe": _native_moe_fake,
    "_native_route": native_route_fake,
    "_native_quant": _native_quant_fake,
    "_native_dequant": _native_dequant_fake,
    "_native_dequant_out": _native_dequant_out_fake,
    "_native_qdq": _like_x_fake,
}


def _register() -> None:
    for name, schema in (_schemas.PUBLIC | _schemas.ALIASES | _schemas.LEAVES).items():
        if not torch._C._jit_get_schemas_for_operator(f"mxfp4::{name}"):  # _C_schemas.so may have come first
            LIBRARY.define(name + schema)
    for name, (kernel, fake) in KERNELS.items():
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mxfp4::{name}", fake, lib=LIBRARY)
    for name, alias in ALIASES.items():
        LIBRARY.impl(name, alias, "CompositeImplicitAutograd")
    for name, leaf in _LEAF_FAKES.items():
        torch.library.register_fake(f"mxfp4::{name}", leaf, lib=LIBRARY)
    with contextlib.suppress(RuntimeError):  # a wrong MXFP4_CPU_ISA: importing works, the first use of a kernel says it
        cpu_isa()  # loads the library and asks it now: tracing must not be the first to do so


_register()
