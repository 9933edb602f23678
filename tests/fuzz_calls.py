"""Random calls for fuzz.py: valid arguments of every op, and one or two changes that may make them wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from mxfp4_ops import ACTIVATIONS, BACKENDS
from mxfp4_ops.layout import SLOTS
from problems import Problem, inputs, weights
from torch import Tensor

OPS = torch.ops.mxfp4
TAGS = [b.layout.tag for b in BACKENDS]
RULES = ("even", "floor", "ceil", "rceil")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
          torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex64)  # fmt: skip
ONE_BYTE = (torch.uint8, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


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


# --- valid calls ------------------------------------------------------------------------------------------------------


def _rows(r: random.Random) -> tuple[int, ...]:
    return r.choice([(), (0,), (1,), (3,), (2, 3), (5, 1, 2)])


def _x(r: random.Random, g: torch.Generator) -> Tensor:
    shape = (*_rows(r), 32 * r.choice([0, 1, 1, 2, 3, 5]))
    return (torch.randn(shape, generator=g) * 2.0 ** r.randint(-140, 100)).to(r.choice(FLOATS))


def _quant(r: random.Random, g: torch.Generator) -> Call:
    return Call("quant", {"x": _x(r, g), "scale_rule": r.choice(RULES)})


def _qdq(r: random.Random, g: torch.Generator) -> Call:
    return Call("qdq", {"x": _x(r, g), "scale_rule": r.choice(RULES)})


def _qdq_alias(r: random.Random, g: torch.Generator) -> Call:
    return Call("qdq_mxfp4", {"x": _x(r, g), "scale_calculation_mode": r.choice(RULES)})


def _bytes(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)


def _dequant_pair(r: random.Random, g: torch.Generator) -> tuple[Tensor, Tensor]:
    rows, n = _rows(r), r.choice([0, 1, 2, 5])
    return _bytes(g, *rows, 16 * n), _bytes(g, *rows, n)


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


def _problem(r: random.Random) -> Problem:
    name = r.choice(["silu", "silu", "swigluoai", *ACTIVATIONS])
    sizes = [r.choice([1, 2, 5]), 32 * r.choice([1, 2, 3]), 32 * r.choice([1, 2, 3, 5])]
    return Problem("fuzz", *sizes, r.choice([1, 2, 4]), r.choice([0, 1, 2, 5, 9, 40]), name, r.random() < 0.7)


def _parameters(r: random.Random, name: str) -> dict[str, float]:
    row, chosen = ACTIVATIONS[name], {}
    for key, values in (("alpha", [0.5, 1.702, 3]), ("beta", [0.25, 1.0, 9.0]), ("limit", [0.3, 7.0, float("inf")])):
        if getattr(row, key) is not None and r.random() < 0.5:
            chosen[key] = r.choice(values)
    return chosen


def _prepared(r: random.Random, problem: Problem) -> tuple[dict[str, Any], list[Tensor]]:
    experts = weights(problem, seed=r.randrange(1000))
    options = {"layout": r.choice(TAGS), "activation": problem.activation, **_parameters(r, problem.activation)}
    return options, OPS.prepare_moe(*experts.tensors().values(), **options)


def _moe(r: random.Random, g: torch.Generator) -> Call:
    problem = _problem(r)
    options, packed = _prepared(r, problem)
    x, ids, routing = inputs(problem, r.choice(FLOATS), seed=r.randrange(1000))
    args = {"x": x, "topk_ids": ids.to(r.choice([torch.int32, torch.int64])), "topk_weights": routing}
    args |= {**dict(zip(SLOTS, packed, strict=False)), "aux": packed[6:], "expert_ids": None, "x_scale": None}
    if r.random() < 0.25:
        numbers = r.sample(range(problem.experts + 3), problem.experts)
        args["expert_ids"] = torch.tensor(numbers, dtype=torch.int32)
    args |= {**options, "hidden": problem.hidden, "intermediate": problem.intermediate}
    args |= {flag: True for flag in ("weight_on_input", "batch_invariant") if r.random() < 0.2}
    return Call(r.choice(["moe", "moe", "mxfp4_moe", "function"]), args)


def _prepare(r: random.Random, g: torch.Generator) -> Call:
    problem = _problem(r)
    options = {"layout": r.choice(TAGS), "activation": problem.activation, **_parameters(r, problem.activation)}
    options["interleaved"] = problem.gated and r.random() < 0.3
    return Call("prepare_moe", {**weights(problem, r.randrange(1000), 0, 255).tensors(), **options})


def _unprepare(r: random.Random, g: torch.Generator) -> Call:
    problem = _problem(r)
    options, packed = _prepared(r, problem)
    sizes = {"hidden": problem.hidden, "intermediate": problem.intermediate, "gated": problem.gated}
    return Call("unprepare_moe", {"packed": packed, "layout": options["layout"], **sizes})


def _repack(r: random.Random, g: torch.Generator) -> Call:
    problem = _problem(r)
    options, packed = _prepared(r, problem)
    one = {n: None if t is None else t[0] for n, t in weights(problem, seed=r.randrange(1000)).tensors().items()}
    facts = {"problem": problem}
    return Call("repack_expert", {"packed": packed, "expert": r.randrange(problem.experts), **one, **options}, facts)


def _localise(r: random.Random, g: torch.Generator) -> Call:
    held = r.choice([0, 1, 4, 9])
    ids = torch.randint(-1, 12, (*_rows(r), r.choice([0, 1, 4])), generator=g).to(r.choice([torch.int32, torch.int64]))
    return Call("localise", {"topk_ids": ids, "expert_ids": torch.tensor(r.sample(range(12), held), dtype=torch.int32)})


def _route(r: random.Random, g: torch.Generator) -> Call:
    experts = r.choice([1, 2, 7, 33])
    logits = (torch.randn(r.choice([0, 1, 5]), experts, generator=g) * r.choice([1, 20])).to(r.choice(FLOATS))
    args = {"logits": logits, "correction_bias": None, "input_ids": None, "hash_table": None}
    args |= {"top_k": r.randint(1, min(experts, 8)), "method": r.choice(["softmax_topk", "topk_softmax"])}
    if r.random() < 0.3:
        args["scale"] = 2.5
    if args["method"] == "softmax_topk" and r.random() < 0.5:
        args["renormalize"] = False
    return Call("route", args)


MAKERS = (_quant, _qdq, _qdq_alias, _dequant, _dequant_alias, _dequant_out, _moe, _moe, _moe, _prepare, _unprepare,
          _repack, _localise, _route)  # fmt: skip


# --- changes ----------------------------------------------------------------------------------------------------------


def _gaps(t: Tensor, r: random.Random) -> Tensor:
    return torch.stack((t, t), -1)[..., 0]


def _transposed(t: Tensor, r: random.Random) -> Tensor:
    return t.mT.contiguous().mT if t.dim() >= 2 else t


def _offset(t: Tensor, r: random.Random) -> Tensor:
    flat = t.new_empty(t.numel() + 1)
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


def _misaligned(t: Tensor, r: random.Random) -> Tensor:
    """Elements that start at an odd address, as in a file that is mapped."""
    raw = bytearray(1 + t.numel() * t.element_size())
    raw[1:] = t.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return torch.frombuffer(raw, dtype=t.dtype, offset=1).view(t.shape) if t.numel() else t


def _expanded(t: Tensor, r: random.Random) -> Tensor:
    return t[:1].expand_as(t) if t.dim() and t.shape[0] else t


def _negated(t: Tensor, r: random.Random) -> Tensor:
    return torch._neg_view(t) if t.dtype.is_floating_point else t


def _other_dtype(t: Tensor, r: random.Random) -> Tensor:
    dtype = r.choice(DTYPES)
    if dtype in ONE_BYTE and t.dtype in ONE_BYTE:
        return t.view(dtype)
    return t if torch.float4_e2m1fn_x2 in (dtype, t.dtype) or dtype is torch.float8_e8m0fnu else t.to(dtype)


def _other_shape(t: Tensor, r: random.Random) -> Tensor:
    return r.choice([lambda: t[..., :-1] if t.dim() else t, lambda: t[None], lambda: t.flatten(),
                     lambda: t.new_zeros(()), lambda: t[:0] if t.dim() else t,
                     lambda: torch.cat((t, t)) if t.dim() else t, lambda: t[..., :0] if t.dim() else t])()  # fmt: skip


def _odd_values(t: Tensor, r: random.Random) -> Tensor:
    if not t.numel() or t.dtype in ONE_BYTE[1:] or t.dim() == 4:  # 4: padding is in it, which only prepare may write
        return t
    t = t.clone()
    floats = [float("nan"), float("inf"), -float("inf"), 2.0**-140, -(2.0**-149), 65504.0, 3e38, 0.0]
    wide = {torch.int32: [2**31 - 1, -(2**31)], torch.int64: [2**40, 2**32, -(2**63)]}
    whole = [0, 1, 127, 254, 255] if t.dtype is torch.uint8 else [-1, -2, 4, 5, 99, *wide.get(t.dtype, [])]
    values = floats if t.dtype.is_floating_point or t.dtype.is_complex else whole
    t.view(-1)[r.randrange(t.numel())] = r.choice(values)
    return t


TensorChange = Callable[[Tensor, random.Random], Any]
# The first keep a call right; whether the others do, and where, is for the package and the answer to agree on.
HARMLESS: tuple[TensorChange, ...] = (_gaps, _transposed, _offset, _misaligned, _negated)
CHANGES: tuple[TensorChange, ...] = (
    _expanded, _other_dtype, _other_dtype, _other_shape, _other_shape, _odd_values, _odd_values, _odd_values,
    lambda t, r: None, lambda t, r: "tensor", lambda t, r: t.to("meta"),
    lambda t, r: t.clone().requires_grad_() if t.dtype in (*FLOATS, torch.float64) else t,
)  # fmt: skip
ODD_NUMBERS = (0, -1, 1, 33, 48, 64, 1 << 40, (1 << 62), -(1 << 62))
ODD_FLOATS = (float("nan"), float("inf"), -1.0, 0.0, 1e-45, 1e39, 2.0)
ODD_STRINGS = ("", "nope", "even", "silu", "gelu", "canonical", "native_cpu.tile32.v1", "EVEN", "softmax_topk")


def _change_option(call: Call, name: str, r: random.Random) -> None:
    value = call.args[name]
    if name.endswith("dtype"):  # no int: torch takes any for a dtype, and crashes by itself for 64
        call.args[name] = r.choice([*DTYPES, "even"])
    elif isinstance(value, bool):
        call.args[name] = not value
    elif isinstance(value, int):
        call.args[name] = r.choice(ODD_NUMBERS)
    elif isinstance(value, float):
        call.args[name] = r.choice(ODD_FLOATS)
    elif isinstance(value, str):
        call.args[name] = r.choice(ODD_STRINGS)
    elif isinstance(value, list):
        call.args[name] = r.choice([value[:-1], [*value, torch.zeros(1)], []])
    else:
        call.args[name] = r.choice([torch.zeros(2), 1.5, 3, "even", torch.zeros(1, dtype=torch.int32)])


def _set(call: Call, name: str, value: Any) -> None:
    if name.endswith("]"):
        place, index = name[:-1].split("[")
        call.args[place] = [*call.args[place]]
        call.args[place][int(index)] = value
    else:
        call.args[name] = value


def _change(call: Call, r: random.Random) -> None:
    tensors = call.tensors()
    if r.random() < 0.25:
        name = r.choice([n for n in call.args if n not in tensors] or list(call.args))
        _change_option(call, name, r)
        change = "option"
    else:
        name = r.choice(list(tensors))
        apply = r.choice(CHANGES)
        _set(call, name, apply(tensors[name], r))
        change = apply.__name__
    call.changes.append(f"{name}: {change}")
    call.valid = False


def make(seed: int, index: int) -> Call:
    """Call number ``index`` of a seed: the same always."""
    r = random.Random(f"{seed}:{index}")
    call = r.choice(MAKERS)(r, torch.Generator().manual_seed(r.randrange(1 << 30)))
    kind = r.random()
    if kind < 0.25:  # harmless: another way to lie in memory, for inputs that no layout owns
        owned = (*SLOTS, "out")
        names = [n for n in call.tensors() if "[" not in n and (n not in owned or call.op == "prepare_moe")]
        for name in r.sample(names, min(len(names), 1)):
            apply = r.choice(HARMLESS)
            _set(call, name, apply(call.args[name], r))
            call.changes.append(f"{name}: {apply.__name__}")
    elif kind < 0.75:
        for _ in range(r.choice([1, 1, 1, 2])):
            if call.tensors():
                _change(call, r)
    elif kind < 0.80:  # shapes only
        for name, tensor in call.tensors().items():
            _set(call, name, tensor.to("meta"))
        call.changes.append("all: meta")
    return call
