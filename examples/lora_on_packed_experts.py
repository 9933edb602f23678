"""Train low-rank adapters around frozen MXFP4 experts: a small layer like gpt-oss's, a toy regression, on a CPU.

    python examples/lora_on_packed_experts.py

What is adapted, and what is not. The experts stay packed, four bits a weight; ``torch.ops.mxfp4.moe`` gives gradients
through them and none for them. Three pairs of thin matrices learn around them:

- router:  logits = Wr x + Br Ar x, ordinary LoRA on a dense matrix;
- input:   the experts see x + Bi Ai x, so every w13[e] acts as w13[e] (1 + Bi Ai), a low-rank change of each expert's
           first product of which all experts share Ai;
- output:  y + Bo Ao y, so every w2[e] (and its bias) acts as (1 + Bo Ao) w2[e], likewise.

Adapters of one expert's own w13 or w2 would need products inside the op; it has none. What each expert does have of its
own are its biases, which are trained here too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from mxfp4_ops import Activation, ExpertWeights, PackedExperts, prepare, quant_mxfp4, route
from torch import Tensor

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, RANK, TOKENS = 64, 64, 8, 2, 4, 256


class LowRank(torch.nn.Module):
    """x to B A x, zero at the start, as LoRA begins."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = torch.nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = torch.nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.down.t() @ self.up.t()


class AdaptedLayer(torch.nn.Module):
    """Router, packed experts, adapters around both. Parameters are the adapters and the experts' biases."""

    def __init__(self, router: Tensor, packed: PackedExperts, rank: int) -> None:
        super().__init__()
        assert packed.w13_bias is not None and packed.w2_bias is not None
        self.register_buffer("router", router)
        self.w13_bias = torch.nn.Parameter(packed.w13_bias.clone())
        self.w2_bias = torch.nn.Parameter(packed.w2_bias.clone())
        self.packed = packed
        experts, hidden = router.shape
        self.on_router = LowRank(hidden, experts, rank)
        self.on_input, self.on_output = LowRank(hidden, hidden, rank), LowRank(hidden, hidden, rank)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = route(x @ self.router.t() + self.on_router(x), TOP_K)
        experts = replace(self.packed, w13_bias=self.w13_bias, w2_bias=self.w2_bias)
        y = experts(x + self.on_input(x), ids, weights)
        return x + y + self.on_output(y)


def make_layer() -> tuple[Tensor, PackedExperts]:
    """A router [E, H] and experts with random weights, packed for this machine."""
    w13, w13_scale = quant_mxfp4(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5)
    w2, w2_scale = quant_mxfp4(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5)
    biases = torch.randn(EXPERTS, 2 * INTERMEDIATE) / 4, torch.randn(EXPERTS, HIDDEN) / 4
    experts = ExpertWeights(w13, w13_scale, biases[0], w2, w2_scale, biases[1])
    return torch.randn(EXPERTS, HIDDEN) / HIDDEN**0.5, prepare(experts, activation=Activation("swigluoai", limit=7.0))


def train(steps: int = 50, seed: int = 0) -> tuple[list[float], AdaptedLayer]:
    """Fit a layer with other adapters, which the learner does not see; return each step's loss, and the layer."""
    torch.manual_seed(seed)
    router, packed = make_layer()
    teacher = AdaptedLayer(router, packed, RANK)
    for adapter in (teacher.on_input, teacher.on_output, teacher.on_router):
        torch.nn.init.normal_(adapter.up, std=0.3)
    x = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        target = teacher(x)
    student = AdaptedLayer(router, packed, RANK)
    optimiser = torch.optim.Adam(student.parameters(), lr=2e-2)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = (student(x) - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses, student


if __name__ == "__main__":
    losses, layer = train()
    trained = sum(p.numel() for p in layer.parameters())
    assert losses[-1] < losses[0] / 3
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps; {trained} trained numbers")
    print(f"frozen: {layer.packed.w13.numel() + layer.packed.w2.numel()} bytes of packed experts")
