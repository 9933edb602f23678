"""Random calls for fuzz.py: valid arguments of every op; here those of numbers and of weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mxfp4_ops
import torch
from mxfp4_ops import ACTIVATIONS, BACKENDS, QUANT_MODES
from mxfp4_ops.x_formats import FORMS
from problems import Problem, weights
from torch import Tensor

OPS = torch.ops.mxfp4
# Public functions that are no ops; "function" is mxfp4_moe, which is one of the same name too.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "function": mxfp4_ops.mxfp4_moe,
    "quant_x": mxfp4_ops.quant_x,
    "quantize_experts": mxfp4_ops.quantize_experts,
    "pack_topk": mxfp4_ops.pack_topk,
    "unpack_topk": mxfp4_ops.unpack_topk,
}
TAGS = [b.layout.tag for b in BACKENDS]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
RULES = ("even", "floor", "ceil", "rceil", *QUANT_MODES)  # those of our own twice as often
QUANTIZABLE = [name for name, form in FORMS.items() if form.x_dtypes]


@dataclass
class Call:
    """An op with its arguments by name; ``facts`` is what the answer needs beyond them; ``changes`` what was done."""

    op: str
    args: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    valid: bool = True  # has to be accepted

    def tensors(self) -> dict[str, Tensor]:
        found = {n: v for n, v in self.args.items() if isinstance(v, Tensor)}
        for name, value in self.args.items():
            if isinstance(value, list):
                found |= {f"{name}[{i}]": t for i, t in enumerate(value) if isinstance(t, Tensor)}
        return found


Maker = Callable[[random.Random, torch.Generator], Call]


def rows(r: random.Random) -> tuple[int, ...]:
    return r.choice([(), (0,), (1,), (3,), (2, 3), (5, 1, 2)])


def _x(r: random.Random, g: torch.Generator) -> Tensor:
    shape = (*rows(r), 32 * r.choice([0, 1, 1, 2, 3, 5]))
    return (torch.randn(shape, generator=g) * 2.0 ** r.randint(-140, 100)).to(r.choice(FLOATS))


def _quant(r: random.Random, g: torch.Generator) -> Call:
    return Call("quant", {"x": _x(r, g), "scale_rule": r.choice(RULES)})


def _qdq(r: random.Random, g: torch.Generator) -> Call:
    return Call("qdq", {"x": _x(r, g), "scale_rule": r.choice(RULES)})


def _qdq_alias(r: random.Random, g: torch.Generator) -> Call:
    return Call("qdq_mxfp4", {"x": _x(r, g), "scale_calculation_mode": r.choice(RULES)})


def _quant_x(r: random.Random, g: torch.Generator) -> Call:
    x = torch.randn(r.choice([0, 1, 3, 6]), 32 * r.choice([1, 2, 4, 5]), generator=g)
    x = (x * 2.0 ** r.choice([0, 0, r.randint(-140, 100)])).to(r.choice(FLOATS))
    return Call("quant_x", {"x": x, "x_format": r.choice(QUANTIZABLE)})


def _bytes(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)


def _dequant_pair(r: random.Random, g: torch.Generator) -> tuple[Tensor, Tensor]:
    lead, n = rows(r), r.choice([0, 1, 2, 5])
    return _bytes(g, *lead, 16 * n), _bytes(g, *lead, n)


def _dequant(r: random.Random, g: torch.Generator) -> Call:
    blocks, scales = _dequant_pair(r, g)
    return Call("dequant", {"blocks": blocks, "scales": scales, "dtype": r.choice([None, *FLOATS])})


def _dequant_alias(r: random.Random, g: torch.Generator) -> Call:
    blocks, scales = _dequant_pair(r, g)
    return Call("dequant_mxfp4", {"x": blocks, "scale": scales, "float_dtype": r.choice(FLOATS)})


def _dequant_out(r: random.Random, g: torch.Generator) -> Call:
    blocks, scales = _dequant_pair(r, g)
    out = torch.zeros(*blocks.shape[:-1], blocks.shape[-1] * 2, dtype=r.choice(FLOATS))
    return Call("dequant.out", {"blocks": blocks, "scales": scales, "out": out})


# --- weights ----------------------------------------------------------------------------------------------------------


def problem_of(r: random.Random) -> Problem:
    name = r.choice(["silu", "silu", "swigluoai", *ACTIVATIONS])
    sizes = [r.choice([1, 2, 5]), 32 * r.choice([1, 2, 3]), 32 * r.choice([1, 2, 3, 5])]
    return Problem("fuzz", *sizes, r.choice([1, 2, 4]), r.choice([0, 1, 2, 5, 9, 40]), name, r.random() < 0.7)


def _parameters(r: random.Random, name: str) -> dict[str, float]:
    row, chosen = ACTIVATIONS[name], {}
    for key, values in (("alpha", [0.5, 1.702, 3]), ("beta", [0.25, 1.0, 9.0]), ("limit", [0.3, 7.0, float("inf")])):
        if getattr(row, key) is not None and r.random() < 0.5:
            chosen[key] = r.choice(values)
    return chosen


def prepared(r: random.Random, problem: Problem, layout: str) -> tuple[dict[str, Any], list[Tensor]]:
    """Options of the layer, and its packed tensors."""
    experts = weights(problem, seed=r.randrange(1000))
    options = {"layout": layout, "activation": problem.activation, **_parameters(r, problem.activation)}
    return options, OPS.prepare_moe(*experts.tensors().values(), **options)


def _prepare(r: random.Random, g: torch.Generator) -> Call:
    problem = problem_of(r)
    options = {"layout": r.choice(TAGS), "activation": problem.activation, **_parameters(r, problem.activation)}
    options["interleaved"] = problem.gated and r.random() < 0.3
    return Call("prepare_moe", {**weights(problem, r.randrange(1000), 0, 255).tensors(), **options})


def _unprepare(r: random.Random, g: torch.Generator) -> Call:
    problem = problem_of(r)
    options, packed = prepared(r, problem, r.choice(TAGS))
    sizes = {"hidden": problem.hidden, "intermediate": problem.intermediate, "gated": problem.gated}
    return Call("unprepare_moe", {"packed": packed, "layout": options["layout"], **sizes})


def _repack(r: random.Random, g: torch.Generator) -> Call:
    problem = problem_of(r)
    options, packed = prepared(r, problem, r.choice(TAGS))
    one = {n: None if t is None else t[0] for n, t in weights(problem, seed=r.randrange(1000)).tensors().items()}
    facts = {"problem": problem}
    return Call("repack_expert", {"packed": packed, "expert": r.randrange(problem.experts), **one, **options}, facts)


def _quantize_experts(r: random.Random, g: torch.Generator) -> Call:
    experts, halves, order = r.choice([1, 2, 3]), r.choice([1, 2]), r.choice(["out_in", "in_out"])
    hidden, intermediate, dtype = 32 * r.choice([1, 2]), 32 * r.choice([1, 3]), r.choice(FLOATS)
    shapes = {"w13": (halves * intermediate, hidden), "w2": (hidden, intermediate)}
    args: dict[str, Any] = {}
    for name, shape in shapes.items():
        stack = torch.randn(experts, *(shape if order == "out_in" else shape[::-1]), generator=g).to(dtype)
        args[name] = stack if r.random() < 0.7 else list(stack)
        args[f"{name}_bias"] = torch.randn(experts, shape[0], generator=g) if r.random() < 0.5 else None
    return Call("quantize_experts", {**args, "order": order, "scale_rule": r.choice(RULES)})


# --- routing in one number --------------------------------------------------------------------------------------------


def _pack_topk(r: random.Random, g: torch.Generator) -> Call:
    shape = (*rows(r), r.choice([0, 1, 4]))
    ids = torch.randint(-1, r.choice([2, 300, 32768]), shape, generator=g).to(r.choice(INTS))
    values = torch.randn(shape, generator=g, dtype=torch.float64).to(r.choice([*FLOATS, torch.float64]))
    return Call("pack_topk", {"topk_ids": ids, "topk_weights": values})


def _unpack_topk(r: random.Random, g: torch.Generator) -> Call:
    shape = (*rows(r), r.choice([0, 1, 4]))
    return Call("unpack_topk", {"packed": torch.randint(-(2**31), 2**31, shape, generator=g).int()})


VALUE_MAKERS: tuple[Maker, ...] = (_quant, _qdq, _qdq_alias, _quant_x, _dequant, _dequant_alias, _dequant_out, _prepare,
                                   _unprepare, _repack, _quantize_experts, _pack_topk, _unpack_topk)  # fmt: skip
