"""What the gradients of a layer must be: float64, by the independent answer of ``problems.py``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from mxfp4_ops import Activation, ExpertWeights, PackedExperts
from problems import answer
from torch import Tensor

NAMES = ("x", "topk_weights", "w13_bias", "w2_bias")


@dataclass(frozen=True)
class Layer:
    """Canonical weights and the inputs of one call; ``output_gradient`` is what comes in from behind."""

    experts: ExpertWeights
    x: Tensor
    ids: Tensor
    routing: Tensor
    output_gradient: Tensor
    activation: Activation
    weight_on_input: bool = False

    def differentiable(self) -> dict[str, Tensor]:
        """The inputs that have a gradient, by name, absent biases left out."""
        found = {"x": self.x, "topk_weights": self.routing}
        biases = {"w13_bias": self.experts.w13_bias, "w2_bias": self.experts.w2_bias}
        return found | {n: t for n, t in biases.items() if t is not None}

    def answer(self, inputs: dict[str, Tensor]) -> Tensor:
        """The layer in float64 for other values of the differentiable inputs."""
        biases = {n: t for n, t in inputs.items() if n.endswith("bias")}
        return answer(
            replace(self.experts, **biases),
            inputs["x"],
            self.ids,
            inputs["topk_weights"],
            self.activation,
            weight_on_input=self.weight_on_input,
            round_intermediate=self.x.dtype is not torch.float32,
        )


def wanted(layer: Layer) -> dict[str, Tensor]:
    """float64 gradients, by autograd of the float64 answer."""
    leaves = {n: t.detach().cpu().double().requires_grad_() for n, t in layer.differentiable().items()}
    out = layer.answer(leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), layer.output_gradient.cpu().double())
    return dict(zip(leaves, gradients, strict=True))


def along(layer: Layer, direction: dict[str, Tensor], step: float = 1e-5) -> float:
    """The derivative along a direction, by central differences of the float64 answer: no autograd is in it."""
    inputs = {n: t.detach().cpu().double() for n, t in layer.differentiable().items()}
    ahead, behind = (
        layer.answer({n: t + sign * step * direction[n] for n, t in inputs.items()}) for sign in (1.0, -1.0)
    )
    return float((layer.output_gradient.cpu().double() * (ahead - behind)).sum() / (2 * step))


def found(packed: PackedExperts, layer: Layer, **options: Any) -> dict[str, Tensor]:
    """Our gradients for packed experts, those of padded biases cut to the logical size; checks dtypes and shapes."""
    biases = {n: getattr(packed, n) for n in ("w13_bias", "w2_bias")}
    leaves = {"x": layer.x, "topk_weights": layer.routing} | {n: t for n, t in biases.items() if t is not None}
    leaves = {n: t.detach().clone().requires_grad_() for n, t in leaves.items()}
    mine = replace(packed, **{n: t for n, t in leaves.items() if n.endswith("bias")})
    out = mine(leaves["x"], layer.ids, leaves["topk_weights"], weight_on_input=layer.weight_on_input, **options)
    out.backward(layer.output_gradient)
    gradients = {}
    for name, leaf in leaves.items():
        gradient = leaf.grad
        assert gradient is not None and gradient.dtype is leaf.dtype and gradient.shape == leaf.shape
        gradients[name] = gradient
    return logical(gradients, packed, Activation(packed.activation).gated)


def logical(gradients: dict[str, Tensor], packed: PackedExperts, gated: bool) -> dict[str, Tensor]:
    """Cut the padding off bias gradients, where it must be zero; for layouts that leave biases in canonical order."""
    cut = dict(gradients)
    for name, size, halves in (("w13_bias", packed.intermediate, 2 if gated else 1), ("w2_bias", packed.hidden, 1)):
        if name in gradients:
            parts = gradients[name].unflatten(1, (halves, -1))
            assert (parts[:, :, size:] == 0).all(), name
            cut[name] = parts[:, :, :size].flatten(1)
    return cut


def relative(found: Tensor, wanted: Tensor) -> float:
    """Relative L2 error."""
    return float((found.cpu().double() - wanted).norm() / wanted.norm())
