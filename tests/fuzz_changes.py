"""What fuzz.py does to the arguments of a valid call: other memory, which changes nothing, or one or two that may be
wrong; and ``make``, which draws a call and does it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from fuzz_calls import FLOATS, VALUE_MAKERS, Call
from fuzz_layer_calls import LAYER_MAKERS
from mxfp4_ops import X_FORMATS
from mxfp4_ops.layout import SLOTS
from mxfp4_ops.routing import METHODS
from torch import Tensor

DTYPES = (*FLOATS, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
          torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex64)  # fmt: skip
ONE_BYTE = (torch.uint8, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
MAKERS = (*VALUE_MAKERS, *LAYER_MAKERS)


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
    return torch._neg_view(t) if t.dtype in (*FLOATS, torch.float64) else t


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
ODD_STRINGS = ("", "nope", "even", "silu", "gelu", "canonical", "native_cpu.tile32.v1", "EVEN", "mse", "gguf", "in_out",
               *METHODS, *X_FORMATS)  # fmt: skip


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
        names = [
            n
            for n in call.tensors()
            if "[" not in n and (n not in owned or call.op in ("prepare_moe", "quantize_experts"))
        ]
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
