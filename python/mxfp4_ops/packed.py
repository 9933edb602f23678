"""Packed experts: bytes in one backend's layout, with the tag that says which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .activation import Activation
from .errors import need_type
from .experts import ExpertWeights
from .functional import mxfp4_moe
from .layout import SLOTS


@dataclass(frozen=True)
class PackedExperts:
    """Experts in one backend's layout: plain tensors, the tag that says which, and the sizes and activation they stand
    for.

    Every tensor has the expert as dimension 0. The input scales, float32 [E], are what x and the activation's result
    are divided by under ``x_format="fp8_static"``; ``dataclasses.replace`` puts them in. Call it as a layer:
    ``packed(x, topk_ids, topk_weights)``. It is registered as a pytree, so ``torch.compile`` and ``torch.export`` take
    it as an argument.
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
    w13_input_scale: Tensor | None = None
    w2_input_scale: Tensor | None = None

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
        out: Tensor | None = None,
    ) -> Tensor:
        """Run ``torch.ops.mxfp4.moe`` on these experts; arguments and errors as ``mxfp4_ops.mxfp4_moe`` documents
        them."""
        return mxfp4_moe(
            x,
            topk_ids,
            topk_weights,
            self.w13,
            self.w13_scale,
            self.w13_bias,
            self.w2,
            self.w2_scale,
            self.w2_bias,
            self._aux(x_format),
            expert_ids,
            x_scale,
            **self._options(),
            x_format=x_format,
            weight_on_input=weight_on_input,
            batch_invariant=batch_invariant,
            out=out,
        )

    def unfinalized(
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
    ) -> tuple[Tensor, Tensor]:
        """Run ``torch.ops.mxfp4.moe_unfinalized``: the experts' outputs before the weighted sum, which ``finalize``
        makes.

        Returns rows [R, H] in the result's dtype, biases included, and row_of_slot [T, K] int32, -1 for a skipped slot.
        topk_weights go into the rows only with ``weight_on_input``. Arguments and errors as ``mxfp4_moe``.
        """
        rows, row_of_slot = torch.ops.mxfp4.moe_unfinalized(
            x,
            topk_ids,
            topk_weights,
            *(getattr(self, name) for name in SLOTS),
            self._aux(x_format),
            expert_ids,
            x_scale,
            **self._options(),
            x_format=x_format,
            weight_on_input=weight_on_input,
            batch_invariant=batch_invariant,
        )
        return rows, row_of_slot

    def _aux(self, x_format: str) -> list[Tensor]:
        """What follows the six tensors: the layout's own, and the scales of the one form of x that has them here."""
        scales = (self.w13_input_scale, self.w2_input_scale) if x_format == "fp8_static" else ()
        return [*self.aux, *(s for s in scales if s is not None)]

    def _options(self) -> dict[str, Any]:
        """What the ops must know of the bytes."""
        return {
            "layout": self.layout,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "activation": self.activation,
            "alpha": self.alpha,
            "beta": self.beta,
            "limit": self.limit,
        }

    @property
    def gated(self) -> bool:
        return Activation(self.activation).gated

    def tensors(self) -> list[Tensor]:
        """Six slots, then the layout's aux, as the ops take and return them: an absent tensor has size zero, with
        dimension 0 = E."""
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
