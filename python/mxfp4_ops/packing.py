"""Canonical weights into a backend's layout and back, expert by expert: beside the result, memory holds one
expert, padded and packed.

``Canonical`` below is what ``checks.canonical`` returns: the tensors of a stack by slot name, bytes as uint8, absent
biases left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .errors import need
from .experts import one_expert, pad_expert, unpad_expert
from .layout import BIASES, SLOTS, Layout, Specs, canonical_specs, packed_specs

Canonical = Mapping[str, Tensor]


def pack(weights: Canonical, layout: Layout, *, gated: bool, interleaved: bool) -> list[Tensor]:
    """Pack a stack of experts: six slots, then aux. An absent tensor has size zero, with dimension 0 = E."""
    w2 = weights["w2"]
    need_scale_bytes(weights, layout)
    out = allocate(packed_specs(layout, w2.shape[1], w2.shape[2] * 2, gated), weights, w2.shape[0])
    for e in range(w2.shape[0]):
        pack_expert(out, e, weights, e, layout, gated=gated, interleaved=interleaved)
    return list(out.values())


def pack_expert(
    out: Mapping[str, Tensor],
    row: int,
    weights: Canonical,
    index: int,
    layout: Layout,
    *,
    gated: bool,
    interleaved: bool,
) -> None:
    """Pack expert ``index`` of a canonical stack into row ``row`` of packed tensors, in place, padding included."""
    expert = pad_expert(one_expert(weights, index, interleaved=interleaved), layout, gated=gated)
    for name, tensor in layout.pack(expert, gated).items():
        out[name][row].copy_(tensor)


def allocate(specs: Specs, like: Canonical, experts: int) -> dict[str, Tensor]:
    """Uninitialised tensors of ``specs`` for ``experts`` experts; biases in the dtype they have in ``like``, or size
    zero."""
    out = {}
    for name, spec in specs.items():
        absent = name in BIASES and name not in like
        dtype = torch.uint8 if absent else like[name].dtype if spec.dtype is None else spec.dtype
        out[name] = torch.empty(experts, *((0,) if absent else spec.shape), dtype=dtype, device=like["w13"].device)
    return out


def need_scale_bytes(weights: Canonical, layout: Layout) -> None:
    """Refuse weights with scale bytes that the layout's kernels decode by another rule, naming where the first one
    is."""
    if layout.scale_bytes != range(256):
        _need_bytes_in(weights["w13_scale"], "w13_scale", layout)
        _need_bytes_in(weights["w2_scale"], "w2_scale", layout)


def _need_bytes_in(scales: Tensor, name: str, layout: Layout) -> None:
    low, high = layout.scale_bytes.start, layout.scale_bytes.stop - 1
    found = ((scales < low) | (scales > high)).nonzero()
    e, row, block = found[0].tolist() if len(found) else (0, 0, 0)
    need(
        len(found) == 0,
        lambda: (
            f"mxfp4_ops.prepare: {name} must hold bytes {low}..{high} for layout {layout.tag!r}, got "
            f"{int(scales[e, row, block])} at expert {e}, row {row}, block {block}. Name another backend by prefer=."
        ),
    )


def unpack(
    stacks: Mapping[str, Tensor], layout: Layout, *, hidden: int, intermediate: int, gated: bool
) -> list[Tensor]:
    """Inverse of ``pack`` for checked tensors by name: the six canonical ones in the order of SLOTS, absent biases with
    size zero."""
    present = {n: t for n, t in stacks.items() if n not in BIASES or t.numel()}
    out = allocate(canonical_specs(hidden, intermediate, gated), present, stacks["w13"].shape[0])
    for e in range(stacks["w13"].shape[0]):
        expert = unpack_expert(present, e, layout, hidden=hidden, intermediate=intermediate, gated=gated)
        for name, tensor in expert.items():
            out[name][e].copy_(tensor)
    return [out[name] for name in SLOTS]


def unpack_expert(
    stacks: Mapping[str, Tensor], index: int, layout: Layout, *, hidden: int, intermediate: int, gated: bool
) -> dict[str, Tensor]:
    """The canonical tensors of expert ``index`` of packed tensors, absent ones left out, padding cut off."""
    expert = layout.unpack({n: t[index] for n, t in stacks.items()}, gated)
    return unpad_expert(expert, hidden, intermediate, gated=gated)
