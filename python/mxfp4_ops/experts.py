"""Experts in the canonical form, as checkpoints have them, and what it takes to cut, pad and reorder them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .format import NEUTRAL_SCALE
from .layout import SLOTS, Layout


@dataclass(frozen=True)
class ExpertWeights:
    """Experts as a checkpoint holds them: the canonical form.

    Shapes: w13 [E, S*I, H/2], w13_scale [E, S*I, H/32], w2 [E, H, I/2], w2_scale [E, H, I/32], all uint8 (or same-byte
    views: float4_e2m1fn_x2, float8_e8m0fnu); w13_bias [E, S*I] and w2_bias [E, H] of any float dtype, or None. S is 2
    for gated activations, 1 otherwise. The low nibble of a byte is the even element.
    """

    w13: Tensor
    w13_scale: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_bias: Tensor | None

    def tensors(self) -> dict[str, Tensor | None]:
        """The six tensors by name, in the order of the ops' arguments."""
        return {name: getattr(self, name) for name in SLOTS}


def split_gate_up(rows: Tensor) -> Tensor:
    """Rows g0, u0, g1, u1, ... (dimension 0) to all gate rows, then all up rows."""
    return torch.cat((rows[0::2], rows[1::2]))


def join_gate_up(rows: Tensor) -> Tensor:
    """Inverse of ``split_gate_up``."""
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def one_expert(weights: Mapping[str, Tensor], index: int, *, interleaved: bool) -> dict[str, Tensor]:
    """Canonical bytes of one expert of a checked stack, halves gate then up."""
    return {
        name: split_gate_up(stack[index]) if interleaved and name.startswith("w13") else stack[index]
        for name, stack in weights.items()
    }


def pad_expert(expert: dict[str, Tensor], layout: Layout, *, gated: bool) -> dict[str, Tensor]:
    """Pad one canonical expert to what the layout holds: codes 0, scale bytes 127, biases 0, each half of w13 by
    itself.

    Sizes that fit come back as they are, without a copy.
    """
    hidden, intermediate = expert["w2"].shape[0], expert["w2"].shape[1] * 2
    rows, cols = layout.padded(hidden, intermediate)
    if (rows, cols) == (hidden, intermediate):
        return expert
    halves = 2 if gated else 1
    wanted = {"w13": cols, "w13_scale": cols, "w13_bias": cols, "w2": rows, "w2_scale": rows, "w2_bias": rows}
    width = {"w13": rows // 2, "w13_scale": rows // 32, "w2": cols // 2, "w2_scale": cols // 32}
    padded = {}
    for name, tensor in expert.items():
        parts = tensor.chunk(halves) if name.startswith("w13") else (tensor,)
        fill = NEUTRAL_SCALE if name.endswith("scale") else 0
        padded[name] = torch.cat([_pad(p, wanted[name], width.get(name), fill) for p in parts])
    return padded


def _pad(tensor: Tensor, rows: int, width: int | None, fill: int) -> Tensor:
    shape = (rows,) if width is None else (rows, width)
    out = tensor.new_full(shape, fill)
    out[tuple(slice(size) for size in tensor.shape)] = tensor
    return out


def unpad_expert(expert: dict[str, Tensor], hidden: int, intermediate: int, *, gated: bool) -> dict[str, Tensor]:
    """Inverse of ``pad_expert``: cut every tensor to its logical size."""
    halves = 2 if gated else 1
    rows = {"w13": intermediate, "w13_scale": intermediate, "w13_bias": intermediate}
    width = {"w13": hidden // 2, "w13_scale": hidden // 32, "w2": intermediate // 2, "w2_scale": intermediate // 32}
    cut = {}
    for name, tensor in expert.items():
        parts = tensor.chunk(halves) if name.startswith("w13") else (tensor,)
        parts = tuple(p[: rows.get(name, hidden)] for p in parts)
        whole = torch.cat(parts)
        cut[name] = whole[:, : width[name]].contiguous() if name in width else whole
    return cut
