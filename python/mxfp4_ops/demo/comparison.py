"""The same model with its experts dequantized to bf16, in transformers' own code: what packed experts must match."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import GPT_OSS_EXPERTS, Checkpoint
from ..integrations.transformers import load_gpt_oss
from .progress import Bar


class DequantizedExperts(nn.Module):
    """transformers' GptOssExperts on weights that transformers dequantizes, made in each call and dropped after it.

    One layer's bf16 experts exist at a time: all of gpt-oss-20b's would take 38 GB. Nothing here is our code but the
    loop.
    """

    def __init__(self, config: Any, checkpoint: Checkpoint, layer: int, bar: Bar) -> None:
        super().__init__()
        self.config, self.checkpoint, self.bar = config, checkpoint, bar
        self.prefix = GPT_OSS_EXPERTS.format(layer=layer)

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """Shapes: hidden_states [T, H], router_indices and routing_weights [T, K]. Returns [T, H]."""
        modeling: Any = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss")
        with torch.device("meta"):
            experts = modeling.GptOssExperts(self.config)
        state = {name: self._bf16(name) for name in ("gate_up_proj", "down_proj")}
        state |= {f"{name}_bias": self.checkpoint.tensor(f"{self.prefix}{name}_bias") for name in tuple(state)}
        experts.load_state_dict(state, assign=True)
        out: Tensor = experts(hidden_states, router_indices, routing_weights)
        self.bar.step()
        return out

    def _bf16(self, name: str) -> Tensor:
        """Dequantize expert by expert to [E, in, out]: in one go transformers takes four times the result."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks = self.checkpoint.tensor(f"{self.prefix}{name}_blocks")
        scales = self.checkpoint.tensor(f"{self.prefix}{name}_scales")
        experts, rows, groups = scales.shape
        out = torch.empty(experts, groups * 32, rows, dtype=torch.bfloat16)
        for e in range(experts):
            out[e] = convert_moe_packed_tensors(blocks[e : e + 1], scales[e : e + 1])[0]
        return out


def dequantized_logits(folder: Path, prompt: Tensor) -> Tensor:
    """Logits [T, V] of the bf16 model over prompt [1, T]."""
    layers = Checkpoint.open(folder)
    with Bar("bf16 model for comparison", _layers(layers), "layer") as bar, torch.no_grad():
        model = load_gpt_oss(folder, experts=lambda config, files, layer: DequantizedExperts(config, files, layer, bar))
        logits: Tensor = model(prompt).logits[0]
    return logits


def _layers(checkpoint: Checkpoint) -> int:
    return sum(name.endswith(".mlp.router.weight") for name in checkpoint.files)


@dataclass(frozen=True)
class Agreement:
    """How near the logits of two models are.

    ``error`` is ||a - b|| / ||b||. A position is decided where b's first logit leads its second by more than the
    largest difference seen anywhere: there a difference in rank would be an error and not a tie broken otherwise.
    """

    error: float
    largest: float
    positions: int
    decided: int
    agree_decided: int
    agree: int


def compare_logits(logits: Tensor, reference: Tensor) -> Agreement:
    """Compare logits [T, V] with those of the reference model [T, V]."""
    a, b = logits.double(), reference.double()
    largest = (a - b).abs().max()
    best = b.topk(2, dim=-1)
    decided = best.values[:, 0] - best.values[:, 1] > largest
    same = a.argmax(-1) == best.indices[:, 0]
    return Agreement(
        error=float((a - b).norm() / b.norm()),
        largest=float(largest),
        positions=len(b),
        decided=int(decided.sum()),
        agree_decided=int((decided & same).sum()),
        agree=int(same.sum()),
    )
