"""gpt-oss in transformers, its experts held packed: the model class is theirs, the experts are one op.

Needs transformers >= 5.19, whose router returns (logits, weights [T, K], indices [T, K]) and whose GptOssMLP calls
``experts(x, indices, weights)``, which is how ``MXFP4Experts`` is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..activation import Activation
from ..checkpoint import GPT_OSS_EXPERTS, Checkpoint, json_object, read_gpt_oss_experts
from ..errors import dtype_name, need, need_type
from ..experts import ExpertWeights
from ..nn import MXFP4Experts
from ..packages import need_package
from ..packed import PackedExperts
from ..prepare import prepare, problem_of
from ..problem import MoEProblem

TRANSFORMERS = ("transformers", "5.19")  # the package, and the least version that works
_OP = "mxfp4_ops.integrations.transformers"
_LARGEST = 2**20  # of a size; transformers makes lists as long as the number of layers
_SIZES = ("num_hidden_layers", "num_local_experts", "num_experts_per_tok", "hidden_size", "intermediate_size")

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
    Returns the model in eval mode, on the CPU. Raises as ``read_gpt_oss_config`` and ``read_gpt_oss_experts``;
    ValueError where config.json and the tensors do not belong together. Headers of all files and sizes of all layers
    are read before the first layer is packed.
    """
    config = read_gpt_oss_config(folder)
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    for layer in range(config.num_hidden_layers):  # what does not fit is said before anything is packed
        read_gpt_oss_layer(config, checkpoint, layer)
    model = _empty_model(config, checkpoint)
    rest = _rest(model, checkpoint)
    make = experts or (lambda c, files, layer: MXFP4Experts(pack_gpt_oss_layer(c, files, layer, prefer=prefer)))
    for layer in progress(range(config.num_hidden_layers)):
        model.model.layers[layer].mlp.experts = make(config, checkpoint, layer)
    # Frequencies are computed, not stored: only a module that was not made on the meta device has them.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.load_state_dict(rest, strict=False, assign=True)
    if config.tie_word_embeddings:
        model.tie_weights()
    model.requires_grad_(False)
    return model.eval()


def read_gpt_oss_config(folder: str | os.PathLike[str]) -> Any:
    """Read config.json as a GptOssConfig.

    Raises: FileNotFoundError where there is none; ValueError where it is not that of a gpt-oss model with MXFP4
    experts, or sizes are no positive numbers; MissingPackage without transformers >= 5.19.
    """
    need_package(_OP, *TRANSFORMERS)
    from transformers import GptOssConfig

    path = Path(folder) / "config.json"
    found = json_object(_OP, path)
    kind, quantization = found.get("model_type"), found.get("quantization_config")
    need(kind == "gpt_oss", lambda: f"{_OP}: {path} must have model_type 'gpt_oss', got {kind!r}.")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    need(
        method == "mxfp4",
        lambda: f"{_OP}: {path} must have quant_method 'mxfp4' in quantization_config, got {method!r}.",
    )
    for name in _SIZES:
        size = found.get(name)
        need(
            type(size) is int and 0 < size <= _LARGEST,
            lambda n=name, s=size: f"{_OP}: {path} must have a whole number from 1 to {_LARGEST} as {n}, got {s!r}.",  # type: ignore[misc]
        )
    with _described_by(path):
        return GptOssConfig.from_pretrained(folder, local_files_only=True)


@contextmanager
def _described_by(path: Path) -> Iterator[None]:
    """Name the file whose numbers transformers or torch cannot make a model of."""
    try:
        yield
    except Exception as error:  # theirs are of many types, KeyError among them
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{_OP}: {path} must describe a gpt-oss model, but transformers says {reason}.") from error


def _empty_model(config: Any, checkpoint: Checkpoint) -> Any:
    """GptOssForCausalLM on the meta device."""
    from transformers import GptOssForCausalLM

    if hasattr(config, "quantization_config"):
        # It tells transformers to quantize or dequantize experts; here they are no longer its business.
        del config.quantization_config
    with _described_by(checkpoint.folder / "config.json"), torch.device("meta"):
        return GptOssForCausalLM(config)


def read_gpt_oss_layer(config: Any, checkpoint: Checkpoint, layer: int) -> tuple[ExpertWeights, MoEProblem]:
    """Map the experts of one layer, without reading them, and hold their sizes to those of the config."""
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
    need(
        problem.bias,
        lambda: f"{_OP}: layer {layer} in {checkpoint.folder} must have the biases of experts, found none.",
    )
    return weights, problem


def pack_gpt_oss_layer(config: Any, checkpoint: Checkpoint, layer: int, *, prefer: str | None = None) -> PackedExperts:
    """Read and pack the experts of one layer, with the sizes and the activation of the config."""
    weights, problem = read_gpt_oss_layer(config, checkpoint, layer)
    return prepare(weights, problem, interleaved=True, prefer=prefer)


def gpt_oss_activation(config: Any) -> Activation:
    """The clamped SwiGLU of gpt-oss: g sigmoid(alpha g) (u + 1), with the config's swiglu_alpha and swiglu_limit."""
    return Activation("swigluoai", alpha=float(config.swiglu_alpha), beta=1.0, limit=float(config.swiglu_limit))


def packed_modules(model: nn.Module) -> list[MXFP4Experts]:
    """The packed experts of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, MXFP4Experts)]


def _rest(model: Any, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Map every parameter that is no expert's from the checkpoint, and hold it to the model's shape."""
    state: dict[str, Tensor] = {}
    experts = tuple(GPT_OSS_EXPERTS.format(layer=layer) for layer in range(model.config.num_hidden_layers))
    for name, parameter in model.named_parameters():
        if name.startswith(experts) or (model.config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        found = state[name] = checkpoint.tensor(name)
        where = f"{_OP}: {checkpoint.folder / checkpoint.files[name]}: {name}"
        need_type(
            found.dtype in (torch.bfloat16, torch.float16, torch.float32),
            lambda w=where, f=found: f"{w} must be bfloat16, float16 or float32, got {dtype_name(f.dtype)}.",  # type: ignore[misc]
        )
        need(
            found.shape == parameter.shape,
            lambda w=where, p=parameter, f=found: (  # type: ignore[misc]
                f"{w} must be {list(p.shape)}, as config.json says, got {list(f.shape)}."
            ),
        )
    return state
