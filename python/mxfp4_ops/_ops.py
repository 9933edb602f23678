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

from . import _schemas, checks, format, packing
from ._extension import cpu_isa
from .activation import resolve
from .backends import Backend
from .dispatch import backend_of
from .format import BLOCK, SCALE_RULES, as_bytes
from .layout import BIASES, SLOTS, canonical_specs, packed_specs
from .moe_call import localise, localise_fake, moe, moe_fake

_CHUNK = 1 << 15  # blocks that dequant_out expands at once in plain torch: 4 MiB of float32, not a second result
LIBRARY = torch.library.Library("mxfp4", "DEF")


def _native(x: Tensor) -> bool:
    """Whether the compiled leaves run on x's device."""
    return x.device.type == "cpu" and cpu_isa() != "torch"  # an error here, should MXFP4_CPU_ISA be wrong


# --- quant, dequant, qdq ----------------------------------------------------------------------------------------------


def _quant_fake(x: Tensor, *, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    checks.quant("mxfp4::quant", x, scale_rule)
    return _native_quant_fake(x, 0)


def _quant(x: Tensor, *, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    checks.quant("mxfp4::quant", x, scale_rule)
    if _native(x):
        return torch.ops.mxfp4._native_quant(x.contiguous(), SCALE_RULES[scale_rule])
    return format.quant(x.contiguous(), scale_rule)


def _dequant_fake(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    dtype = torch.bfloat16 if dtype is None else dtype
    checks.dequant("mxfp4::dequant", blocks, scales, dtype)
    return _native_dequant_fake(blocks, scales, dtype)


def _dequant(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    dtype = torch.bfloat16 if dtype is None else dtype
    checks.dequant("mxfp4::dequant", blocks, scales, dtype)
    blocks, scales = as_bytes(blocks).contiguous(), as_bytes(scales).contiguous()
    if _native(blocks):
        return torch.ops.mxfp4._native_dequant(blocks, scales, dtype)
    return format.dequant(blocks, scales, dtype)


def _dequant_out_fake(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    checks.dequant_out("mxfp4::dequant_out", blocks, scales, out)


def _dequant_out(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    checks.dequant_out("mxfp4::dequant_out", blocks, scales, out)
    blocks, scales = as_bytes(blocks).contiguous(), as_bytes(scales).contiguous()
    if _native(blocks):
        torch.ops.mxfp4._native_dequant_out(blocks, scales, out)
        return
    parts = (t.view(-1, width).split(_CHUNK) for t, width in ((blocks, 16), (scales, 1), (out, BLOCK)))
    for some_blocks, some_scales, some_out in zip(*parts, strict=True):
        some_out.copy_(format.dequant(some_blocks, some_scales, out.dtype))


def _qdq_fake(x: Tensor, *, scale_rule: str = "even") -> Tensor:
    checks.quant("mxfp4::qdq", x, scale_rule)
    return x.new_empty(x.shape)


def _qdq(x: Tensor, *, scale_rule: str = "even") -> Tensor:
    checks.quant("mxfp4::qdq", x, scale_rule)
    if _native(x):
        return torch.ops.mxfp4._native_qdq(x.contiguous(), SCALE_RULES[scale_rule])
    return format.qdq(x.contiguous(), scale_rule)


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


# --- route ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _RouteCall:
    """The arguments of ``route``, in the schema's order."""

    logits: Tensor
    correction_bias: Tensor | None
    input_ids: Tensor | None
    hash_table: Tensor | None
    top_k: int
    method: str = "softmax_topk"
    groups: int = 1
    topk_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0

    def check(self, op: str) -> None:
        unused = {name: getattr(self, name) for name in ("correction_bias", "input_ids", "hash_table")}
        checks.route(op, self.logits, self.top_k, self.method, self.renormalize)
        checks.route_unused(op, self.method, unused, self.groups, self.topk_groups)


def _route_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = _RouteCall(*args, **kwargs)
    call.check("mxfp4::route")
    shape = (call.logits.shape[0], call.top_k)
    return call.logits.new_empty(shape, dtype=torch.int32), call.logits.new_empty(shape, dtype=torch.float32)


def _route(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = _RouteCall(*args, **kwargs)
    call.check("mxfp4::route")
    logits = call.logits.float()
    scores = logits if call.method == "topk_softmax" else logits.softmax(-1)
    values, ids = scores.sort(dim=-1, descending=True, stable=True)  # stable: a tie goes to the lower expert
    values, ids = values[:, : call.top_k], ids[:, : call.top_k]
    if call.method == "topk_softmax":
        values = values.softmax(-1)
    elif call.renormalize:
        values = values / values.sum(-1, keepdim=True)
    return ids.to(torch.int32).contiguous(), (values * call.scale).contiguous()


# --- leaves: shapes only; the compiled library has the kernels --------------------------------------------------------


def _native_quant_fake(x: Tensor, scale_rule: int) -> tuple[Tensor, Tensor]:
    lead, n = x.shape[:-1], x.shape[-1]
    return x.new_empty(*lead, n // 2, dtype=torch.uint8), x.new_empty(*lead, n // BLOCK, dtype=torch.uint8)


def _native_dequant_fake(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return blocks.new_empty(*blocks.shape[:-1], blocks.shape[-1] * 2, dtype=dtype)


def _writes_only_fake(*args: Any) -> None:
    """The result is an argument, whose shape is known."""


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

_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "moe": (moe, moe_fake),
    "route": (_route, _route_fake),
    "quant": (_quant, _quant_fake),
    "dequant": (_dequant, _dequant_fake),
    "dequant_out": (_dequant_out, _dequant_out_fake),
    "qdq": (_qdq, _qdq_fake),
    "prepare_moe": (_prepare_moe, _prepare_fake),
    "unprepare_moe": (_unprepare_moe, _unprepare_fake),
    "repack_expert": (_repack_expert, _repack_fake),
    "localise": (localise, localise_fake),
}
_ALIASES: dict[str, Callable[..., Any]] = {
    "mxfp4_moe": _mxfp4_moe,
    "dequant_mxfp4": _dequant_mxfp4,
    "qdq_mxfp4": _qdq_mxfp4,
}
_LEAF_FAKES: dict[str, Callable[..., Any]] = {
    "_native_moe": _native_moe_fake,
    "_native_quant": _native_quant_fake,
    "_native_dequant": _native_dequant_fake,
    "_native_dequant_out": _writes_only_fake,
    "_native_qdq": _like_x_fake,
}


def _register() -> None:
    for name, schema in (_schemas.PUBLIC | _schemas.ALIASES | _schemas.LEAVES).items():
        LIBRARY.define(name + schema)
    for name, (kernel, fake) in _KERNELS.items():
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mxfp4::{name}", fake, lib=LIBRARY)
    for name, alias in _ALIASES.items():
        LIBRARY.impl(name, alias, "CompositeImplicitAutograd")
    for name, leaf in _LEAF_FAKES.items():
        torch.library.register_fake(f"mxfp4::{name}", leaf, lib=LIBRARY)
    with contextlib.suppress(RuntimeError):  # a wrong MXFP4_CPU_ISA: importing works, the first use of a kernel says it
        cpu_isa()  # loads the library and asks it now: tracing must not be the first to do so


_register()
