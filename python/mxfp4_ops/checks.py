"""One check for each op, called by its fake and by its kernel: bad input meets a sentence before any work.

Weights and quantized tensors stand here, tokens in ``token_checks.py``. A sentence reads ``op: argument must <rule>,
got <value>. <remedy>``; sizes are in logical elements where a size is meant. Nothing here reads tensor data, and
nothing branches on the number of tokens, so one compiled graph serves every T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from .argument_checks import (
    need_bytes,
    need_contiguous,
    need_device,
    need_dims,
    need_dtype,
    need_float,
    need_shape,
    need_tensor,
)
from .backends import Backend
from .errors import dtype_name, need, need_type
from .format import BLOCK, FLOAT_DTYPES, as_bytes, need_blocks
from .layout import BIASES, SLOTS, TensorSpec, canonical_specs, packed_specs
from .quant_modes import QUANT_MODES

NVFP4_HINT = " One scale covers 32 elements, not 16: is this an NVFP4 checkpoint?"
_BIAS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_LABELS = {"w13": "[E, S*I, H/2]", "w13_scale": "[E, S*I, H/32]", "w2": "[E, H, I/2]", "w2_scale": "[E, H, I/32]"}
_LABELS |= {"w13_bias": "[E, S*I]", "w2_bias": "[E, H]"}


def scale_rule(op: str, rule: str, name: str = "scale_rule") -> None:
    need(rule in QUANT_MODES, lambda: f"{op}: {name} must be one of {', '.join(QUANT_MODES)}, got {rule!r}.")


def quant(op: str, x: Tensor, rule: str, name: str = "scale_rule") -> None:
    scale_rule(op, rule, name)
    need_dtype(op, "x", x, FLOAT_DTYPES)
    need(x.dim() > 0, lambda: f"{op}: x must have at least one dimension, got a scalar.")
    need(
        x.shape[-1] % BLOCK == 0,
        lambda: f"{op}: the last dimension of x must be a multiple of {BLOCK}, got {x.shape[-1]}.",
    )


def dequant(op: str, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    need_bytes(op, "blocks", blocks)
    need_bytes(op, "scales", scales)
    _dtype_argument(op, dtype)
    need(blocks.dim() > 0, lambda: f"{op}: blocks must have at least one dimension, got a scalar.")
    n = blocks.shape[-1] * 2
    need(
        n % BLOCK == 0, lambda: f"{op}: the last dimension of blocks must hold a multiple of {BLOCK} elements, got {n}."
    )
    need_shape(
        op,
        "scales",
        scales,
        (*blocks.shape[:-1], n // BLOCK),
        "[..., n/32]",
        f" blocks hold n = {n} elements, and one scale covers {BLOCK}.",
    )
    need_device(op, "scales", scales, blocks)


def _dtype_argument(op: str, dtype: torch.dtype) -> None:
    need_type(
        dtype in FLOAT_DTYPES, lambda: f"{op}: dtype must be float32, bfloat16 or float16, got {dtype_name(dtype)}."
    )


def _absent(bias: object) -> bool:
    return isinstance(bias, Tensor) and bias.numel() == 0


def canonical(op: str, weights: Mapping[str, Tensor | None], *, gated: bool) -> dict[str, Tensor]:
    """Check a canonical stack; return its tensors as bytes, absent biases (None or size zero) left out."""
    present = {n: t for n, t in weights.items() if n not in BIASES or (t is not None and not _absent(t))}
    for name, slot in present.items():
        need_float(op, name, cast(Tensor, slot)) if name in BIASES else need_bytes(op, name, cast(Tensor, slot))
    stacks = cast("dict[str, Tensor]", present)
    w13, w2 = stacks["w13"], stacks["w2"]
    need_dims(op, "w13", w13, 3, _LABELS["w13"])
    need_dims(op, "w2", w2, 3, _LABELS["w2"])
    hidden, intermediate = w13.shape[2] * 2, w2.shape[2] * 2
    need_blocks(op, "hidden (twice the last dimension of w13)", hidden)
    need_blocks(op, "intermediate (twice the last dimension of w2)", intermediate)
    for name, spec in canonical_specs(hidden, intermediate, gated).items():
        if name in stacks:
            _canonical_shape(op, name, stacks[name], (w13.shape[0], *spec.shape), gated=gated)
            need_device(op, name, stacks[name], w13)
    return {n: t if n in BIASES else as_bytes(t) for n, t in stacks.items()}


def _canonical_shape(op: str, name: str, tensor: Tensor, wanted: Sequence[int], *, gated: bool) -> None:
    remedy = ""
    if name.endswith("scale") and tensor.dim() == 3 and tensor.shape[2] == 2 * wanted[2]:
        remedy = NVFP4_HINT
    elif name in ("w13", "w13_bias") and tensor.dim() > 1 and tensor.shape[1] != wanted[1]:
        rows = "two halves, gate rows then up rows" if gated else "one half, since the activation is not gated"
        remedy = f" S*I rows are {rows}."
    need_shape(op, name, tensor, wanted, _LABELS[name], remedy)


def names(op: str, backend: Backend, hidden: int, intermediate: int, *, gated: bool) -> list[str]:
    """The names of a layout's tensors for logical sizes, which are checked here: six slots, then aux."""
    need_blocks(op, "hidden", hidden)
    need_blocks(op, "intermediate", intermediate)
    return list(packed_specs(backend.layout, hidden, intermediate, gated))


def packed(
    op: str,
    tensors: Mapping[str, Tensor | None],
    backend: Backend,
    hidden: int,
    intermediate: int,
    *,
    gated: bool,
    like: Tensor | None = None,
) -> dict[str, Tensor | None]:
    """Check packed tensors by name against the layout that they claim to be in, and that they are where ``like`` is.

    Returns them as backends take them: bytes as uint8, and an absent bias (None, or [E, 0] as prepare_moe returns it)
    as None.
    """
    specs = packed_specs(backend.layout, hidden, intermediate, gated)
    w13 = tensors["w13"]
    need_tensor(op, "w13", w13)
    need(
        w13 is not None and w13.dim() > 0, lambda: f"{op}: w13 must have the experts as dimension 0, got no dimension."
    )
    w13 = cast(Tensor, w13)
    experts, device = w13.shape[0], w13.device if like is None else like.device
    plain: dict[str, Tensor | None] = {}
    for name, tensor in tensors.items():
        spec = specs[name]
        plain[name] = tensor
        if (tensor is None and name in BIASES) or (
            # All is well, in one comparison: this runs at each call.
            tensor is not None
            and (tensor.dtype is spec.dtype or (spec.dtype is None and tensor.dtype in _BIAS_DTYPES))
            and tensor.shape == (experts, *spec.shape)
            and tensor.device == device
            and tensor.is_contiguous()
        ):
            continue
        need_tensor(op, name, tensor)
        tensor = cast(Tensor, tensor)
        need_device(op, name, tensor, w13 if like is None else like)
        if name in BIASES and tensor.dim() == 2 and tensor.shape[1] == 0:
            plain[name] = None
            continue
        _packed_tensor(op, name, tensor, spec, w13, backend, gated=gated)
        plain[name] = tensor if name in BIASES else as_bytes(tensor)
    return plain


def _packed_tensor(
    op: str, name: str, tensor: Tensor, spec: TensorSpec, w13: Tensor, backend: Backend, *, gated: bool
) -> None:
    if spec.dtype is None:
        need_float(op, name, tensor)
    elif spec.dtype is torch.uint8:
        need_bytes(op, name, tensor)
    else:
        need_dtype(op, name, tensor, (spec.dtype,))
    if backend.layout.tag == "canonical":
        _canonical_shape(op, name, tensor, (w13.shape[0], *spec.shape), gated=gated)
    else:
        label = f"packed as layout {backend.layout.tag!r} needs it,"
        need_shape(
            op,
            name,
            tensor,
            (w13.shape[0], *spec.shape),
            label,
            " Were the weights packed for other sizes or by another layout?",
        )
        need_contiguous(op, name, tensor, "Call .contiguous() on it once, where weights are loaded.")


def packed_list(
    op: str, tensors: Sequence[Tensor], backend: Backend, hidden: int, intermediate: int, *, gated: bool
) -> dict[str, Tensor]:
    """Check a packed list; return its tensors by name, bytes as uint8, absent biases with size zero."""
    found = names(op, backend, hidden, intermediate, gated=gated)
    need(
        len(tensors) == len(found),
        lambda: f"{op}: packed must hold {len(found)} tensors ({', '.join(found)}), got {len(tensors)}.",
    )
    given = dict(zip(found, tensors, strict=True))
    plain = packed(op, dict(given), backend, hidden, intermediate, gated=gated)
    return {name: tensor if (seen := plain[name]) is None else seen for name, tensor in given.items()}


def out(op: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> None:
    """A caller's buffer for the result."""
    need_tensor(op, "out", tensor)
    need_type(tensor.dtype is dtype, lambda: f"{op}: out must be {dtype_name(dtype)}, got {dtype_name(tensor.dtype)}.")
    need_shape(op, "out", tensor, shape, "the result's shape")
    need_device(op, "out", tensor, like, "the input's")


def no_gradient(op: str, *tensors: Tensor | None) -> None:
    """Refuse to write into ``out`` what a graph would have to record."""
    need(
        not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)),
        lambda: f"{op}: out must not be given where a gradient is needed. Leave it out, or call under torch.no_grad().",
    )


def one_expert_stack(op: str, weights: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """One expert's tensors (two dimensions; biases one) as a stack of one."""
    for name, tensor in weights.items():
        if tensor is not None:
            need_dims(op, name, tensor, 1 if name in BIASES else 2, "one expert's, " + _LABELS[name].replace("E, ", ""))
    return {n: None if t is None else t[None] for n, t in weights.items()}


def aux(op: str, tensors: Sequence[Tensor], expected: Sequence[str]) -> None:
    extra = expected[len(SLOTS) :]
    need(
        len(tensors) == len(extra),
        lambda: f"{op}: aux must hold {len(extra)} tensors ({', '.join(extra) or 'none here'}), got {len(tensors)}.",
    )


def interleaved(op: str, value: bool, *, gated: bool) -> None:
    need(gated or not value, lambda: f"{op}: interleaved must be False for an activation without a gate, got True.")


def repack(op: str, stacks: Mapping[str, Tensor], expert: int, weights: Mapping[str, Tensor]) -> None:
    """One expert must fit into the packed stack: its index, and the same biases in the same dtypes."""
    experts = stacks["w13"].shape[0]
    need(expert >= 0 and bool(expert < experts), lambda: f"{op}: expert must be in 0..{experts - 1}, got {expert}.")
    need_device(op, "w13", weights["w13"], stacks["w13"])
    for name, stack in stacks.items():  # an expanded stack holds one expert for all, and writing one would change all
        need_contiguous(op, f"{name} in packed", stack, "It is overwritten in place.")
    for name in BIASES:
        _same_bias(op, name, stacks[name], weights.get(name))


def _same_bias(op: str, name: str, stack: Tensor, bias: Tensor | None) -> None:
    held = dtype_name(stack.dtype) if stack.numel() else "absent"
    given = "absent" if bias is None else dtype_name(bias.dtype)
    need(held == given, lambda: f"{op}: {name} must be {held}, as it is in packed, got {given}.")
    need(
        not stack.requires_grad,
        lambda: f"{op}: {name} in packed must not require a gradient, since it is overwritten. Detach it.",
    )
