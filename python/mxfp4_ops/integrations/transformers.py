"""gpt-oss in transformers, its experts held packed: the model class is theirs, the experts are one op.

Needs transformers >= 5.19, whose router returns (logits, weights [T, K], indices [T, K]) and whose GptOssMLP calls
``experts(x, indices, weights)``, which is how ``MXFP4Experts`` is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..activation import Activation
from ..checkpoint import Checkpoint, read_gpt_oss_experts
from ..errors import need
from ..nn import MXFP4Experts
from ..packed import PackedExperts
from ..prepare import prepare, problem_of

_OP = "mxfp4_ops.integrations.transformers"

Progress = Callable[[Iterable[int]], Iterable[int]]  # tqdm, or anything that passes layers on


def load_gpt_oss(
    folder: str | os.PathLike[str],
    *,
    prefer: str | None = None,
    experts: Callable[[Any, Checkpoint, int], nn.Module] | None = None,
    progress: Progress = iter,
) -> Any:
    """Build GptOssForCausalLM from a checkpoint in the Hugging Face format, with every layer's experts packed.

    The model is made on the meta device, so no bf16 experts ever exist; other weights map the files. Layers are packed
    one after the other: the peak is the model as it will stay, plus one expert. ``prefer`` names the backend, as in
    ``prepare``.
    ``experts(config, checkpoint, layer)`` makes another module in the place of the packed experts.
    Returns the model in eval mode, on the CPU. Raises as ``read_gpt_oss_experts``; ValueError where config.json and the
    tensors do not belong together.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    checkpoint = Checkpoint.open(folder)
    config = GptOssConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        # It tells transformers to quantize or dequantize experts; here they are no longer its business.
        del config.quantization_config
    with torch.device("meta"):
        model: Any = GptOssForCausalLM(config)
    make = experts or (lambda c, files, layer: MXFP4Experts(pack_gpt_oss_layer(c, files, layer, prefer=prefer)))
    for layer in progress(range(config.num_hidden_layers)):
        model.model.layers[layer].mlp.experts = make(config, checkpoint, layer)
    # Frequencies are computed, not stored: only a module that was not made on the meta device has them.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    _assign_rest(model, checkpoint)
    model.requires_grad_(False)
    return model.eval()


def pack_gpt_oss_layer(config: Any, checkpoint: Checkpoint, layer: int, *, prefer: str | None = None) -> PackedExperts:
    """Read and pack the experts of one layer, with the sizes and the activation of the config."""
    weights = read_gpt_oss_experts(checkpoint, layer)
    problem = problem_of(
        weights, activation=gpt_oss_activation(config), top_k=config.num_experts_per_tok, x_dtype=torch.bfloat16
    )
    for ours, theirs in (
        ("experts", "num_local_experts"),
        ("hidden", "hidden_size"),
        ("intermediate", "intermediate_size"),
    ):
        found, needed = getattr(problem, ours), getattr(config, theirs)
        need(
            found == needed,
            lambda f=found, n=needed, t=theirs, o=ours: (
                f"{_OP}: the tensors of layer {layer} in {checkpoint.folder} have {o} = {f}, "  # type: ignore[misc]
                f"but config.json says {t} = {n}."
            ),
        )
    return prepare(weights, problem, interleaved=True, prefer=prefer)


def gpt_oss_activation(config: Any) -> Activation:
    """The clamped SwiGLU of gpt-oss: g sigmoid(alpha g) (u + 1), with the config's swiglu_alpha and swiglu_limit."""
    return Activation("swigluoai", alpha=float(config.swiglu_alpha), beta=1.0, limit=float(config.swiglu_limit))


def packed_modules(model: nn.Module) -> list[MXFP4Experts]:
    """The packed experts of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, MXFP4Experts)]


def _assign_rest(model: Any, checkpoint: Checkpoint) -> None:
    """Give every parameter that is still on the meta device its tensor from the checkpoint."""
    state: dict[str, Tensor] = {}
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta" or (tied and name == "lm_head.weight"):
            continue
        state[name] = checkpoint.tensor(name)
        need(
            state[name].shape == parameter.shape,
            lambda n=name, p=parameter: (
                f"{_OP}: {checkpoint.folder / checkpoint.files[n]}: {n} must be {list(p.shape)}, "  # type: ignore[misc]
                f"as config.json says, got {list(state[n].shape)}."
            ),
        )
    model.load_state_dict(state, strict=False, assign=True)
    if tied:
        model.tie_weights()
