"""The same model with its experts dequantized to bf16, in transformers' own code: what packed experts must match."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import GPT_OSS_EXPERTS, Checkpoint
from ..functional import dequant_mxfp4
from ..integrations.transformers import load_gpt_oss
from .progress import Bar


class DequantizedExperts(nn.Module):
    """transformers' GptOssExperts on bf16 weights that are made in each call and dropped after it.

    One layer's bf16 experts exist at a time: all of gpt-oss-20b's would take 38 GB.
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
        """Dequantize a stack to [E, in, out], as transformers does: its own conversion of expert 0 must give the same.

        For all experts its conversion takes 70 s a layer at gpt-oss-20b's sizes (2 cores), and four times the memory.
        The result is a transposed view: products with bf16 matrices that lie [in, out] take 50 times as long on a
        CPU.
        """
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks = self.checkpoint.tensor(f"{self.prefix}{name}_blocks")
        scales = self.checkpoint.tensor(f"{self.prefix}{name}_scales")
        experts = dequant_mxfp4(blocks.flatten(2), scales).transpose(1, 2)
        theirs = convert_moe_packed_tensors(blocks[:1], scales[:1])[0]
        if not torch.equal(experts[0], theirs):
            raise RuntimeError(f"mxfp4_ops demo: {self.prefix}{name} is dequantized otherwise by transformers.")
        return experts


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

    ``error`` is ||a - b|| / ||b||, ``median`` the same of the median position: where two experts nearly tie in the
    router, rounding may choose the other one, and such a position is far off in any two computations. A position is
    decided where b's first logit leads its second by more than the position's own largest difference; below that, a
    difference in rank is a tie broken otherwise. ``largest`` is the largest difference of the median position.
    """

    error: float
    median: float
    largest: float
    positions: int
    decided: int
    agree_decided: int
    agree: int


def compare_logits(logits: Tensor, reference: Tensor) -> Agreement:
    """Compare logits [T, V] with those of the reference model [T, V]."""
    a, b = logits.double(), reference.double()
    largest = (a - b).abs().amax(-1)
    best = b.topk(2, dim=-1)
    decided = best.values[:, 0] - best.values[:, 1] > largest
    same = a.argmax(-1) == best.indices[:, 0]
    return Agreement(
        error=float((a - b).norm() / b.norm()),
        median=float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median()),
        largest=float(largest.median()),
        positions=len(b),
        decided=int(decided.sum()),
        agree_decided=int((decided & same).sum()),
        agree=int(same.sum()),
    )
