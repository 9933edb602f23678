"""Random calls for fuzz.py: valid arguments of the ops of the layer, and of those that choose its experts."""

from __future__ import annotations

import random
from typing import Any

import mxfp4_ops
import torch
from fuzz_calls import FLOATS, INTS, QUANTIZABLE, TAGS, Call, Maker, prepared, problem_of, rows
from mxfp4_ops import X_FORMATS
from mxfp4_ops.layout import SLOTS
from mxfp4_ops.routing import METHODS
from problems import Problem, inputs
from torch import Tensor

FORMED = [name for name in X_FORMATS if name != "none"]
_MOST_FORMED_TOKENS = 9  # the answer rounds in Python


def _static_scales(experts: int, g: torch.Generator) -> list[Tensor]:
    return [torch.rand(experts, generator=g) / 50 + 1e-3 for _ in range(2)]


def _formed(r: random.Random, g: torch.Generator, args: dict[str, Any]) -> None:
    """Let x enter the products in another form, or come quantized."""
    name = r.choice(FORMED)
    args["x_format"] = name
    if name == "fp8_static":
        args["aux"] = _static_scales(len(args["w13"]), g)
    elif name in QUANTIZABLE and r.random() < 0.6:
        args["x"], args["x_scale"] = mxfp4_ops.quant_x(args["x"], name)


def _layer(r: random.Random, g: torch.Generator, problem: Problem, *, formed: bool) -> dict[str, Any]:
    """The arguments of ``moe``."""
    layout = "canonical" if formed else r.choice(TAGS)
    options, packed = prepared(r, problem, layout)
    x, ids, routing = inputs(problem, r.choice(FLOATS), seed=r.randrange(1000))
    args = {"x": x, "topk_ids": ids.to(r.choice(INTS)), "topk_weights": routing}
    args |= {**dict(zip(SLOTS, packed, strict=False)), "aux": packed[6:] if r.random() < 0.7 else None}
    args |= {"expert_ids": None, "x_scale": None}
    if r.random() < 0.25:
        numbers = r.sample(range(problem.experts + 3), problem.experts)
        args["expert_ids"] = torch.tensor(numbers, dtype=torch.int32)
    args |= {**options, "hidden": problem.hidden, "intermediate": problem.intermediate, "x_format": "none"}
    args |= {flag: True for flag in ("weight_on_input", "batch_invariant") if r.random() < 0.2}
    if formed:
        _formed(r, g, args)
    return args


def _moe(r: random.Random, g: torch.Generator) -> Call:
    problem, formed = problem_of(r), r.random() < 0.3
    if formed:
        problem = problem.with_(tokens=min(problem.tokens, _MOST_FORMED_TOKENS))
    args = _layer(r, g, problem, formed=formed)
    call = Call(
        r.choice(["moe", "moe", "mxfp4_moe", "function", "moe.out", "moe_unfinalized", "moe_unfinalized"]), args
    )
    if formed and r.random() < 0.1:  # a layout whose kernels know "none" alone
        options, packed = prepared(r, problem, TAGS[0])
        args |= {**dict(zip(SLOTS, packed, strict=False)), "layout": options["layout"]}
        call.valid = False
    if call.op == "moe.out":
        dtype = torch.bfloat16 if args["x_scale"] is not None else args["x"].dtype
        args["out"] = torch.zeros(problem.tokens, problem.hidden, dtype=dtype)
    if call.op == "function" and args["aux"] is None:
        args["aux"] = []
    return call


def _backward(r: random.Random, g: torch.Generator) -> Call:
    problem = problem_of(r)
    problem = problem.with_(tokens=min(problem.tokens, 5))
    args = _layer(r, g, problem, formed=False)
    asked = [True, True, problem.bias, problem.bias]
    mask = [wanted and r.random() < 0.8 for wanted in asked]
    gradient = torch.randn(args["x"].shape, generator=g).to(args["x"].dtype)
    call = Call("moe_backward", {"grad_output": gradient, **args, "output_mask": mask})
    if r.random() < 0.05:
        args["x_format"] = call.args["x_format"] = r.choice(FORMED)
        call.valid = False
    return call


def _finalize(r: random.Random, g: torch.Generator) -> Call:
    count, shape = r.choice([0, 1, 7]), (r.choice([0, 1, 4]), r.choice([1, 2, 5]))
    values = torch.randn(count, r.choice([1, 32, 96]), generator=g).to(r.choice(FLOATS))
    places = torch.randint(-1, count, shape, dtype=torch.int32, generator=g)
    routing = torch.rand(shape, generator=g).to(r.choice([*FLOATS, torch.float64]))
    return Call("finalize", {"rows": values, "row_of_slot": places, "topk_weights": routing})


def _localise(r: random.Random, g: torch.Generator) -> Call:
    held = r.choice([0, 1, 4, 9])
    ids = torch.randint(-1, 12, (*rows(r), r.choice([0, 1, 4])), generator=g).to(r.choice(INTS))
    return Call("localise", {"topk_ids": ids, "expert_ids": torch.tensor(r.sample(range(12), held), dtype=torch.int32)})


def _groups(r: random.Random, experts: int, biased: bool) -> tuple[int, int]:
    """Groups, of two experts or more where a bias is given, and how many of them are kept."""
    allowed = [n for n in range(1, experts + 1) if experts % n == 0 and not (biased and n > 1 and experts // n < 2)]
    groups = r.choice(allowed)
    return groups, r.randint(1, groups)


def _route(r: random.Random, g: torch.Generator) -> Call:
    experts, tokens = r.choice([1, 2, 7, 8, 24, 33]), r.choice([0, 1, 5])
    name = r.choice(list(METHODS))
    method = METHODS[name]
    logits = torch.randn(tokens, experts, generator=g) * r.choice([1, 20])
    args: dict[str, Any] = {"logits": logits.to(r.choice([*FLOATS, torch.float64])), "correction_bias": None}
    args |= {"input_ids": None, "hash_table": None, "method": name}
    args["renormalize"] = r.random() < 0.5 if method.renormalize is None else method.renormalize
    if r.random() < 0.4:
        args["scale"] = r.choice([2.5, 0.5, -1.0, 0.0])
    hashed = method.hash_table and r.random() < 0.5
    if method.bias and not hashed and r.random() < 0.5:
        args["correction_bias"] = torch.rand(experts, generator=g).to(r.choice([torch.float32, torch.float64]))
    most = experts
    if method.groups and r.random() < 0.5:
        args["groups"], args["topk_groups"] = _groups(r, experts, args["correction_bias"] is not None)
        most = experts // args["groups"] * args["topk_groups"]
    args["top_k"] = r.randint(1, min(most, 8))
    if hashed:
        vocabulary = r.choice([1, 9])
        table = torch.randint(0, experts, (vocabulary, args["top_k"]), generator=g)
        args["hash_table"] = table.to(r.choice(INTS))
        args["input_ids"] = torch.randint(0, vocabulary, (tokens,), generator=g).to(r.choice(INTS))
    return Call("route", args)


LAYER_MAKERS: tuple[Maker, ...] = (_moe, _moe, _moe, _moe, _backward, _finalize, _localise, _route, _route)
