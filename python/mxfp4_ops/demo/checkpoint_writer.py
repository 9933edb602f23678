"""Write a gpt-oss checkpoint with random weights: the real tensor names and shapes, few layers, a small vocabulary.

Random weights cannot talk, but they exercise every byte and every kernel as trained ones do. They are scaled so that
hidden states stay of unit size, the clamp of the activation bites now and then, routing varies from token to token,
and logits differ enough to compare their order.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import GPT_OSS_EXPERTS
from ..functional import quant_mxfp4
from .progress import Bar

_GATE_UP_GAIN = 2.0  # standard deviation of the first product: |u| > 7 happens, rarely
_ROUTER_GAIN = 1.5  # standard deviation of the router's logits: top-4 weights of about 0.4, 0.3, 0.2, 0.1
_LOGIT_GAIN = 3.0  # standard deviation of the model's logits


@dataclass(frozen=True)
class Sizes:
    """What config.json says about sizes, in elements. The defaults are gpt-oss-20b's, but for layers and vocabulary."""

    layers: int = 2
    hidden: int = 2880
    intermediate: int = 2880
    experts: int = 32
    top_k: int = 4
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    vocab: int = 2048
    window: int = 128


# For tests: seconds, not minutes. No two sizes are equal, so that a transposed tensor cannot pass.
SMALL = Sizes(layers=2, hidden=96, intermediate=160, experts=8, heads=4, kv_heads=2, head_dim=16, vocab=256, window=16)


def config_of(sizes: Sizes) -> dict[str, Any]:
    """config.json with the keys that openai/gpt-oss-20b's has."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": None,  # random weights would end early by chance
        "experts_per_token": sizes.top_k,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": sizes.intermediate,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(sizes.layers)],
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": sizes.heads,
        "num_experts_per_tok": sizes.top_k,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "num_local_experts": sizes.experts,
        "output_router_logits": False,
        "pad_token_id": None,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": sizes.window,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": sizes.vocab,
    }


def write_checkpoint(folder: Path, sizes: Sizes, *, seed: int = 0, sharded: bool = True) -> int:
    """Write config.json and safetensors files; return the bytes written.

    Sharded, every layer is a file of its own beside model.safetensors.index.json, and the peak of memory is one
    packed layer and one bf16 expert; else all tensors are in model.safetensors.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(sizes), indent=2) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    files = sizes.layers + 1
    whole: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    written = 0
    with Bar("writing a checkpoint", sizes.layers * sizes.experts, "expert") as bar:
        for part in range(files):
            last = part == sizes.layers
            tensors = _outer(sizes, generator) if last else _layer(sizes, part, generator, bar)
            written += sum(t.numel() * t.element_size() for t in tensors.values())
            if not sharded:
                whole |= tensors
                continue
            name = f"model-{part + 1:05d}-of-{files:05d}.safetensors"
            save_file(tensors, folder / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
    if sharded:
        index = {"metadata": {"total_size": written}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    else:
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    return written


def _gaussian(generator: torch.Generator, *shape: int, std: float, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, generator=generator) * std + mean).to(torch.bfloat16)


def _linear(generator: torch.Generator, rows: int, columns: int, gain: float = 1.0) -> Tensor:
    return _gaussian(generator, rows, columns, std=gain / math.sqrt(columns))


def _outer(sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "model.embed_tokens.weight": _gaussian(generator, sizes.vocab, sizes.hidden, std=1.0),
        "model.norm.weight": _gaussian(generator, sizes.hidden, std=0.1, mean=1.0),
        "lm_head.weight": _linear(generator, sizes.vocab, sizes.hidden, _LOGIT_GAIN),
    }


def _layer(sizes: Sizes, layer: int, generator: torch.Generator, bar: Bar) -> dict[str, Tensor]:
    prefix, hidden = f"model.layers.{layer}.", sizes.hidden
    width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    tensors = {
        f"{prefix}{norm}.weight": _gaussian(generator, hidden, std=0.1, mean=1.0)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for name, rows, columns in (
        ("q", width, hidden),
        ("k", kv_width, hidden),
        ("v", kv_width, hidden),
        ("o", hidden, width),
    ):
        tensors[f"{prefix}self_attn.{name}_proj.weight"] = _linear(generator, rows, columns)
        tensors[f"{prefix}self_attn.{name}_proj.bias"] = _gaussian(generator, rows, std=0.1)
    tensors[f"{prefix}self_attn.sinks"] = _gaussian(generator, sizes.heads, std=1.0)
    tensors[f"{prefix}mlp.router.weight"] = _linear(generator, sizes.experts, hidden, _ROUTER_GAIN)
    tensors[f"{prefix}mlp.router.bias"] = _gaussian(generator, sizes.experts, std=0.1)
    return tensors | _experts(sizes, GPT_OSS_EXPERTS.format(layer=layer), generator, bar)


def _experts(sizes: Sizes, prefix: str, generator: torch.Generator, bar: Bar) -> dict[str, Tensor]:
    """Quantize gaussian experts one by one into the stacks of a layer."""
    experts, rows = sizes.experts, {"gate_up_proj": 2 * sizes.intermediate, "down_proj": sizes.hidden}
    columns = {"gate_up_proj": sizes.hidden, "down_proj": sizes.intermediate}
    gains = {"gate_up_proj": _GATE_UP_GAIN, "down_proj": 1.0}
    tensors = {}
    for name, n in rows.items():
        tensors[f"{prefix}{name}_blocks"] = torch.empty(experts, n, columns[name] // 32, 16, dtype=torch.uint8)
        tensors[f"{prefix}{name}_scales"] = torch.empty(experts, n, columns[name] // 32, dtype=torch.uint8)
        tensors[f"{prefix}{name}_bias"] = _gaussian(generator, experts, n, std=0.1)
    for e in range(experts):
        for name, n in rows.items():
            blocks, scales = quant_mxfp4(_linear(generator, n, columns[name], gains[name]))
            tensors[f"{prefix}{name}_blocks"][e].flatten(1).copy_(blocks)
            tensors[f"{prefix}{name}_scales"][e].copy_(scales)
        bar.step()
    return tensors
