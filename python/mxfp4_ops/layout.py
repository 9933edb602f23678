"""What a packed layout is: the shapes of its tensors, and two functions that are exact inverses, one expert at a
time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# The six tensors of every layout, in the order of the ops' arguments. What a layout holds beyond them travels in
# ``aux``.
SLOTS = ("w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias")
BIASES = ("w13_bias", "w2_bias")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one expert's tensor; dtype None: as the checkpoint has it (biases). Absent tensors have shape
    (0,)."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.uint8


Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Layout:
    """How the bytes of ONE expert lie. The stack of experts adds dimension 0, so dimension 0 is the expert, always.

    ``specs(hidden, intermediate, gated)`` takes padded sizes and names every tensor, the six slots first, aux after
    them. ``pack`` takes the six canonical tensors of one expert, already padded, biases included only where there are
    any; ``unpack`` takes what ``pack`` returned, with ``gated``, and gives the same bytes back. Both are pure.
    Biases keep their numbers, whatever their places and dtype: the backward packs their gradients by ``pack``.
    """

    tag: str  # never parsed, never reused with another meaning
    hidden_multiple: int
    intermediate_multiple: int
    specs: Callable[[int, int, bool], Specs]
    pack: Callable[[Mapping[str, Tensor], bool], dict[str, Tensor]]
    unpack: Callable[[Mapping[str, Tensor], bool], dict[str, Tensor]]
    scale_bytes: range = range(256)  # what the kernels of this layout decode by the rules of format.py

    def padded(self, hidden: int, intermediate: int) -> tuple[int, int]:
        """Round the logical sizes up to what this layout holds."""
        return _round_up(hidden, self.hidden_multiple), _round_up(intermediate, self.intermediate_multiple)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@functools.lru_cache(maxsize=1024)
def packed_specs(layout: Layout, hidden: int, intermediate: int, gated: bool) -> Specs:
    """The specs of a layout for logical sizes: what fakes, checks, allocation and tests read."""
    return layout.specs(*layout.padded(hidden, intermediate), gated)


def canonical_specs(hidden: int, intermediate: int, gated: bool) -> Specs:
    """The shapes of the checkpoint contract: rows of codes, low nibble first, one scale byte per 32 elements."""
    rows = (2 if gated else 1) * intermediate
    return {
        "w13": TensorSpec((rows, hidden // 2)),
        "w13_scale": TensorSpec((rows, hidden // 32)),
        "w13_bias": TensorSpec((rows,), None),
        "w2": TensorSpec((hidden, intermediate // 2)),
        "w2_scale": TensorSpec((hidden, intermediate // 32)),
        "w2_bias": TensorSpec((hidden,), None),
    }
