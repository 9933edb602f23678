"""The two forms in which experts are held: canonical bytes as checkpoints have them, and packed bytes with their
tag."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .activation import Activation
from .errors import need_type
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


@dataclass(frozen=True)
class PackedExperts:
    """Experts in one backend's layout: plain tensors, the tag that says which, and the sizes and activation they stand
    for.

    Every tensor has the expert as dimension 0. Call it as a layer: ``packed(x, topk_ids, topk_weights)``. It is
    registered as a pytree, so ``torch.compile`` and ``torch.export`` take it as an argument.
    """

    w13: Tensor
    w13_scale: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_bias: Tensor | None
    aux: tuple[Tensor, ...]
    layout: str
    hidden: int
    intermediate: int
    activation: str = "silu"
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        expert_ids: Tensor | None = None,
        x_scale: Tensor | None = None,
        x_format: str = "none",
        weight_on_input: bool = False,
        batch_invariant: bool = False,
    ) -> Tensor:
        """Run ``torch.ops.mxfp4.moe`` on these experts; arguments and errors as ``mxfp4_ops.mxfp4_moe`` documents
        them."""
        return torch.ops.mxfp4.moe(
            x,
            topk_ids,
            topk_weights,
            self.w13,
            self.w13_scale,
            self.w13_bias,
            self.w2,
            self.w2_scale,
            self.w2_bias,
            list(self.aux),
            expert_ids,
            x_scale,
            layout=self.layout,
            hidden=self.hidden,
            intermediate=self.intermediate,
            activation=self.activation,
            alpha=self.alpha,
            beta=self.beta,
            limit=self.limit,
            x_format=x_format,
            weight_on_input=weight_on_input,
            batch_invariant=batch_invariant,
        )

    @property
    def gated(self) -> bool:
        return Activation(self.activation).gated

    def tensors(self) -> list[Tensor]:
        """Six slots, then aux, as the ops take and return them: an absent tensor has size zero, with dimension 0 =
        E."""
        return [self._slot(name) for name in SLOTS] + list(self.aux)

    def _slot(self, name: str) -> Tensor:
        tensor: Tensor | None = getattr(self, name)
        return self.w13.new_empty(self.w13.shape[0], 0) if tensor is None else tensor

    @staticmethod
    def from_tensors(
        tensors: Iterable[Tensor], layout: str, hidden: int, intermediate: int, activation: Activation
    ) -> PackedExperts:
        """Inverse of ``tensors()``: size-zero biases become None."""
        w13, w13_scale, w13_bias, w2, w2_scale, w2_bias, *aux = tensors
        return PackedExperts(
            w13,
            w13_scale,
            w13_bias if w13_bias.numel() else None,
            w2,
            w2_scale,
            w2_bias if w2_bias.numel() else None,
            tuple(aux),
            layout,
            hidden,
            intermediate,
            activation.name,
            activation.alpha,
            activation.beta,
            activation.limit,
        )

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors())


torch.export.register_dataclass(PackedExperts, serialized_type_name="mxfp4_ops.PackedExperts")


def need_canonical(op: str, experts: object) -> None:
    """Refuse what is not canonical: preparing twice would make garbage (rule L2)."""
    tag = (
        f"PackedExperts in layout {experts.layout!r}" if isinstance(experts, PackedExperts) else type(experts).__name__
    )
    need_type(
        isinstance(experts, ExpertWeights),
        lambda: f"{op}: experts must be canonical ExpertWeights, got {tag}. Call unprepare() first.",
    )


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
