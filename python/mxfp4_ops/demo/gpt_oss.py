"""The first mode: a gpt-oss model on packed experts, compiled, generating, beside its dequantized self."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..errors import need
from ..integrations.transformers import (
    TRANSFORMERS,
    gpt_oss_activation,
    load_gpt_oss,
    packed_modules,
    read_gpt_oss_config,
)
from ..packages import need_package
from ..problem import MoEProblem, arch_of
from .checkpoint_writer import SMALL, Sizes, write_checkpoint
from .comparison import compare_logits, dequantized_logits
from .generation import Generation, compile_model, compiled_graphs, generate, warm_up
from .progress import Bar
from .report import Report, megabytes

_OP = "mxfp4_ops demo"
_PROMPT = "Four bits are enough to store the weights of a mixture of experts, because"


@dataclass(frozen=True)
class Options:
    """What the command line says. ``checkpoint`` None writes one, in ``out`` or in a temporary folder."""

    checkpoint: Path | None = None
    out: Path | None = None
    small: bool = False
    layers: int | None = None
    prompt_tokens: int = 64
    new_tokens: int = 32
    prompt: str = _PROMPT
    seed: int = 0
    backend: str | None = None
    compile_backend: str = "inductor"
    compare: bool = True
    json: Path | None = None


def run(options: Options) -> Mapping[str, object]:
    """Run the demo, print its table and return the numbers in it."""
    for name, least in (
        ("prompt_tokens", 4),
        ("new_tokens", 2),
    ):  # two lengths of prompt, and a decode after the prefill
        value = getattr(options, name)
        need(value >= least, lambda n=name, v=value, m=least: f"mxfp4_ops demo: {n} must be at least {m}, got {v}.")  # type: ignore[misc]
    need_package(_OP, "safetensors")
    need_package(_OP, *TRANSFORMERS)
    with tempfile.TemporaryDirectory() as place:
        report = _run(options, options.checkpoint or _written(options, options.out or Path(place)))
    return report.finish(options.json)


def _written(options: Options, folder: Path) -> Path:
    sizes = SMALL if options.small else Sizes()
    sizes = sizes if options.layers is None else replace(sizes, layers=options.layers)
    start = time.perf_counter()
    size = write_checkpoint(folder, sizes, seed=options.seed)
    print(
        f"Wrote {megabytes(size)} of random weights to {folder} in {time.perf_counter() - start:.1f} s: {sizes}.",
        flush=True,
    )
    return folder


def _run(options: Options, folder: Path) -> Report:
    config = read_gpt_oss_config(folder)
    print(dispatch.explain(_problem(config)), flush=True)
    start = time.perf_counter()
    with Bar("packing", config.num_hidden_layers, "layer") as bar:
        model = load_gpt_oss(folder, prefer=options.backend, progress=bar.over)
    loaded = time.perf_counter() - start
    prompt, tokenizer = _prompt(options, folder, config)
    report = Report(
        f"gpt-oss on MXFP4 experts: {config.num_hidden_layers} layers of {config.num_local_experts} experts"
    )
    _experts(report, model, loaded)
    with torch.no_grad():
        logits = model(prompt).logits[0] if options.compare else None
    result = _generation(report, model, prompt, options)
    if tokenizer is not None:
        report.add("text", repr(tokenizer.decode(result.tokens)))
    report.values |= {"tokens": result.tokens}
    if logits is not None:
        del model
        _comparison(report, logits, dequantized_logits(folder, prompt))
    return report


def _problem(config: Any) -> MoEProblem:
    return MoEProblem(
        arch=arch_of("cpu"),
        experts=config.num_local_experts,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        top_k=config.num_experts_per_tok,
        activation=gpt_oss_activation(config),
        bias=True,
    )


def _prompt(options: Options, folder: Path, config: Any) -> tuple[Tensor, Any]:
    """The prompt's tokens [1, T] and the checkpoint's tokenizer; without a tokenizer, random tokens."""
    if (folder / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer(options.prompt, return_tensors="pt").input_ids, tokenizer
    generator = torch.Generator().manual_seed(options.seed)
    return torch.randint(config.vocab_size, (1, options.prompt_tokens), generator=generator), None


def _experts(report: Report, model: Any, loaded: float) -> None:
    experts = [module.packed for module in packed_modules(model)]
    backend = dispatch.backend_of("mxfp4_ops demo", experts[0].layout).name
    packed = sum(e.nbytes() for e in experts)
    bf16 = sum(_bf16_bytes(e.w13.shape[0], e.hidden, e.intermediate) for e in experts)
    report.add("backend", f"{backend} (layout {experts[0].layout})", backend=backend, layout=experts[0].layout)
    report.add("load and pack", f"{loaded:.1f} s", load_seconds=loaded)
    text = f"{megabytes(packed)} packed, {megabytes(bf16)} in bf16: {bf16 / packed:.2f} times less"
    report.add("expert memory", text, packed_bytes=packed, bf16_bytes=bf16)


def _bf16_bytes(experts: int, hidden: int, intermediate: int) -> int:
    """Bytes of the same experts in bf16: three matrices and their biases."""
    return 2 * experts * (3 * hidden * intermediate + 2 * intermediate + hidden)


def _generation(report: Report, model: Any, prompt: Tensor, options: Options) -> Generation:
    compile_model(model, options.compile_backend)
    before = compiled_graphs()
    compiling = warm_up(model, prompt, options.new_tokens, model.config.sliding_window)
    warm = compiled_graphs()
    result = generate(model, prompt, options.new_tokens)
    graphs, late = warm - before, compiled_graphs() - warm
    report.add(
        "compiled graphs",
        f"{graphs} with {options.compile_backend} in {compiling:.1f} s, then {late} for a prompt of another length",
        graphs=graphs,
        late_graphs=late,
        compile_seconds=compiling,
    )
    first, rate = result.first_token, result.tokens_per_second
    report.add("time to first token", f"{first * 1e3:.0f} ms for {prompt.shape[1]} tokens", first_token_seconds=first)
    report.add("decode", f"{rate:.2f} tokens/s over {len(result.tokens)} tokens", tokens_per_second=rate)
    return result


def _comparison(report: Report, logits: Tensor, reference: Tensor) -> None:
    found = compare_logits(logits, reference)
    report.add(
        "relative logit error",
        f"{found.error:.2e} against transformers' bf16 experts, {found.median:.2e} at the median position",
        logit_error=found.error,
        median_error=found.median,
        largest_difference=found.largest,
    )
    report.add(
        "top-1 agreement",
        f"{found.agree_decided} of the {found.decided} positions whose margin exceeds their error; "
        f"{found.agree} of all {found.positions}",
        positions=found.positions,
        decided=found.decided,
        agree_decided=found.agree_decided,
        agree=found.agree,
    )
