"""One check for each op, called by its fake and by its kernel: bad input meets a sentence before any work.

A sentence reads ``op: argument must <rule>, got <value>. <remedy>``; sizes are in logical elements where a size is
meant. Nothing here reads tensor data, and nothing branches on the number of tokens, so one compiled graph serves every
T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from .backends import Backend
from .errors import dtype_name, need, need_type
from .format import BLOCK, FLOAT_DTYPES, SCALE_RULES, as_bytes, need_blocks
from .layout import BIASES, SLOTS, TensorSpec, canonical_specs, packed_specs

_CODE_DTYPES = (torch.uint8, torch.float4_e2m1fn_x2)
_SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
_BIAS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ID_DTYPES = (torch.int32, torch.int64)
_FEW_IDS = 64
_METHODS = ("softmax_topk", "topk_softmax")
_LABELS = {"w13": "[E, S*I, H/2]", "w13_scale": "[E, S*I, H/32]", "w2": "[E, H, I/2]", "w2_scale": "[E, H, I/32]"}
_LABELS |= {"w13_bias": "[E, S*I]", "w2_bias": "[E, H]"}


def _tensor(op: str, name: str, tensor: object) -> None:
    """torch lets None through where a schema says Tensor."""
    need_type(isinstance(tensor, Tensor), lambda: f"{op}: {name} must be a tensor, got {tensor!r}.")


def _dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    _tensor(op, name, tensor)
    need_type(
        tensor.dtype in allowed,
        lambda: f"{op}: {name} must be {' or '.join(map(dtype_name, allowed))}, got {dtype_name(tensor.dtype)}.",
    )


def _float(op: str, name: str, tensor: Tensor) -> None:
    _tensor(op, name, tensor)
    need_type(
        tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1,
        lambda: f"{op}: {name} must be a float dtype, got {dtype_name(tensor.dtype)}.",
    )


def _bytes(op: str, name: str, tensor: Tensor) -> None:
    _dtype(op, name, tensor, _SCALE_DTYPES if name.endswith("scale") or name == "scales" else _CODE_DTYPES)


def _device(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    need(
        tensor.device == like.device, lambda: f"{op}: {name} must be on x's device {like.device}, got {tensor.device}."
    )


def _contiguous(op: str, name: str, tensor: Tensor, remedy: str) -> None:
    need(
        tensor.is_contiguous(),
        lambda: f"{op}: {name} must be contiguous, got strides {list(tensor.stride())}. {remedy}",
    )


def _shape(op: str, name: str, tensor: Tensor, wanted: Sequence[int], label: str, remedy: str = "") -> None:
    need(
        tensor.shape == tuple(wanted),
        lambda: f"{op}: {name} must be {label} = {list(wanted)}, got {list(tensor.shape)}.{remedy}",
    )


def _dims(op: str, name: str, tensor: Tensor, dims: int, label: str) -> None:
    need(tensor.dim() == dims, lambda: f"{op}: {name} must be {label}, got {list(tensor.shape)}.")


def scale_rule(op: str, rule: str, name: str = "scale_rule") -> None:
    need(rule in SCALE_RULES, lambda: f"{op}: {name} must be one of {', '.join(SCALE_RULES)}, got {rule!r}.")


def quant(op: str, x: Tensor, rule: str, name: str = "scale_rule") -> None:
    scale_rule(op, rule, name)
    _dtype(op, "x", x, FLOAT_DTYPES)
    need(x.dim() > 0, lambda: f"{op}: x must have at least one dimension, got a scalar.")
    need(
        x.shape[-1] % BLOCK == 0,
        lambda: f"{op}: the last dimension of x must be a multiple of {BLOCK}, got {x.shape[-1]}.",
    )


def dequant(op: str, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    _bytes(op, "blocks", blocks)
    _bytes(op, "scales", scales)
    _dtype_argument(op, dtype)
    need(blocks.dim() > 0, lambda: f"{op}: blocks must have at least one dimension, got a scalar.")
    n = blocks.shape[-1] * 2
    need(
        n % BLOCK == 0, lambda: f"{op}: the last dimension of blocks must hold a multiple of {BLOCK} elements, got {n}."
    )
    _shape(
        op,
        "scales",
        scales,
        (*blocks.shape[:-1], n // BLOCK),
        "[..., n/32]",
        f" blocks hold n = {n} elements, and one scale covers {BLOCK}.",
    )
    _device(op, "scales", scales, blocks)


def dequant_out(op: str, blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """The checks of ``dequant``, and an ``out`` that has room for the result and nothing else to keep."""
    _dtype(op, "out", out, FLOAT_DTYPES)
    dequant(op, blocks, scales, out.dtype)
    _shape(op, "out", out, (*blocks.shape[:-1], blocks.shape[-1] * 2), "[..., n]")
    _device(op, "out", out, blocks)
    _contiguous(op, "out", out, "It is written in place.")
    need(not out.requires_grad, lambda: f"{op}: out must not require a gradient, since it is overwritten. Detach it.")


def _dtype_argument(op: str, dtype: torch.dtype) -> None:
    need_type(
        dtype in FLOAT_DTYPES, lambda: f"{op}: dtype must be float32, bfloat16 or float16, got {dtype_name(dtype)}."
    )


def canonical(op: str, weights: Mapping[str, Tensor | None], *, gated: bool) -> dict[str, Tensor]:
    """Check a canonical stack; return its tensors as bytes, absent biases (None or size zero) left out."""
    present = {n: t for n, t in weights.items() if n not in BIASES or (t is not None and t.numel() > 0)}
    for name, slot in present.items():
        _float(op, name, cast(Tensor, slot)) if name in BIASES else _bytes(op, name, cast(Tensor, slot))
    stacks = cast("dict[str, Tensor]", present)
    w13, w2 = stacks["w13"], stacks["w2"]
    _dims(op, "w13", w13, 3, _LABELS["w13"])
    _dims(op, "w2", w2, 3, _LABELS["w2"])
    hidden, intermediate = w13.shape[2] * 2, w2.shape[2] * 2
    need_blocks(op, "hidden (twice the last dimension of w13)", hidden)
    need_blocks(op, "intermediate (twice the last dimension of w2)", intermediate)
    for name, spec in canonical_specs(hidden, intermediate, gated).items():
        if name in stacks:
            _canonical_shape(op, name, stacks[name], (w13.shape[0], *spec.shape), gated=gated)
            _device(op, name, stacks[name], w13)
    return {n: t if n in BIASES else as_bytes(t) for n, t in stacks.items()}


def _canonical_shape(op: str, name: str, tensor: Tensor, wanted: Sequence[int], *, gated: bool) -> None:
    remedy = ""
    if name.endswith("scale") and tensor.dim() == 3 and tensor.shape[2] == 2 * wanted[2]:
        remedy = " One scale covers 32 elements, not 16: is this an NVFP4 checkpoint?"
    elif name in ("w13", "w13_bias") and tensor.dim() > 1 and tensor.shape[1] != wanted[1]:
        rows = "two halves, gate rows then up rows" if gated else "one half, since the activation is not gated"
        remedy = f" S*I rows are {rows}."
    _shape(op, name, tensor, wanted, _LABELS[name], remedy)


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
    _tensor(op, "w13", w13)
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
        _tensor(op, name, tensor)
        tensor = cast(Tensor, tensor)
        _device(op, name, tensor, w13 if like is None else like)
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
        _float(op, name, tensor)
    elif spec.dtype is torch.uint8:
        _bytes(op, name, tensor)
    else:
        _dtype(op, name, tensor, (spec.dtype,))
    if backend.layout.tag == "canonical":
        _canonical_shape(op, name, tensor, (w13.shape[0], *spec.shape), gated=gated)
    else:
        label = f"packed as layout {backend.layout.tag!r} needs it,"
        _shape(
            op,
            name,
            tensor,
            (w13.shape[0], *spec.shape),
            label,
            " Were the weights packed for other sizes or by another layout?",
        )
        _contiguous(op, name, tensor, "Call .contiguous() on it once, where weights are loaded.")


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


def x_dtype(op: str, x: Tensor) -> None:
    _dtype(op, "x", x, FLOAT_DTYPES)


def x_scale(op: str, scale: Tensor | None, x_format: str) -> None:
    need(scale is None, lambda: f"{op}: x_scale must be None for x_format {x_format!r}, which takes x as it is.")


def moe_inputs(op: str, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, hidden: int) -> None:
    need(
        x.dim() == 2 and bool(x.shape[1] == hidden),
        lambda: f"{op}: x must be [T, H] with H = hidden = {hidden}, got {list(x.shape)}.",
    )
    _dtype(op, "topk_ids", topk_ids, _ID_DTYPES)
    _float(op, "topk_weights", topk_weights)
    _per_token(op, "topk_ids", topk_ids, x)
    _per_token(op, "topk_weights", topk_weights, x)
    need(
        topk_weights.shape[1] == topk_ids.shape[1],
        lambda: (
            f"{op}: topk_weights must have the K = {topk_ids.shape[1]} of topk_ids, got {list(topk_weights.shape)}."
        ),
    )
    need(topk_ids.shape[1] > 0, lambda: f"{op}: topk_ids must have at least one column, got {list(topk_ids.shape)}.")


def _per_token(op: str, name: str, tensor: Tensor, x: Tensor) -> None:
    _dims(op, name, tensor, 2, "[T, K]")
    need(
        tensor.shape[0] == x.shape[0],
        lambda: f"{op}: {name} must be [T, K] with T = {x.shape[0]} as in x, got {list(tensor.shape)}.",
    )
    _device(op, name, tensor, x)


def expert_ids(op: str, ids: Tensor, experts: int | torch.SymInt | None, like: Tensor) -> None:
    _dtype(op, "expert_ids", ids, (torch.int32,))
    _dims(op, "expert_ids", ids, 1, "[E]")
    if experts is not None:
        need(
            ids.shape[0] == experts,
            lambda: f"{op}: expert_ids must name one expert for each of the {experts} in w13, got {ids.shape[0]}.",
        )
    _device(op, "expert_ids", ids, like)


def topk_ids(op: str, ids: Tensor) -> None:
    _dtype(op, "topk_ids", ids, _ID_DTYPES)


def id_values(op: str, ids: Tensor, experts: int | None) -> None:
    """Refuse an id outside -1..E-1. Reads data, so it runs on CPU tensors only; None stands for no upper bound."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    if ids.numel() <= _FEW_IDS:  # a decode step: plain Python is quicker than a kernel and two reads of its result
        values = ids.flatten().tolist()
        low, high = min(values), max(values)
    else:
        low, high = (int(v) for v in torch.aminmax(ids))
    need(low >= -1, lambda: f"{op}: topk_ids must be -1 (skip) or an expert, got {low}.")
    if experts is not None:
        need(high < experts, lambda: f"{op}: topk_ids must be below the number of experts E = {experts}, got {high}.")


def expert_numbers(op: str, ids: Tensor) -> None:
    """Refuse an expert named twice, which would count twice in a sum over ranks, and a negative number, which a skipped
    slot would find. CPU tensors only."""
    if ids.device.type != "cpu":
        return
    values = ids.sort().values
    least = 0 if values.numel() == 0 else int(values[0])
    need(least >= 0, lambda: f"{op}: expert_ids must be expert numbers from 0 on, got {least}.")
    twice = values[1:][values[1:] == values[:-1]].tolist()
    need(not twice, lambda: f"{op}: expert_ids must not repeat, got {twice[0]} more than once.")


def route(op: str, logits: Tensor, top_k: int, method: str, renormalize: bool) -> None:
    _float(op, "logits", logits)
    _dims(op, "logits", logits, 2, "[T, E]")
    need(method in _METHODS, lambda: f"{op}: method must be one of {', '.join(_METHODS)}, got {method!r}.")
    need(
        top_k > 0 and bool(top_k <= logits.shape[1]),
        lambda: f"{op}: top_k must be between 1 and the number of experts {logits.shape[1]}, got {top_k}.",
    )
    need(
        renormalize or method != "topk_softmax",
        lambda: f"{op}: renormalize must be True for method 'topk_softmax', whose weights sum to 1 by definition.",
    )


def route_unused(op: str, method: str, tensors: Mapping[str, Tensor | None], groups: int, topk_groups: int) -> None:
    """Refuse what the softmax methods have no use for: it may not be ignored."""
    given = [name for name, tensor in tensors.items() if tensor is not None]
    need(not given, lambda: f"{op}: {given[0]} must be None for method {method!r}, which does not use it.")
    need(
        groups == 1 and topk_groups == 1,
        lambda: f"{op}: groups and topk_groups must be 1 for method {method!r}, got {groups} and {topk_groups}.",
    )


def one_expert_stack(op: str, weights: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """One expert's tensors (two dimensions; biases one) as a stack of one."""
    for name, tensor in weights.items():
        if tensor is not None:
            _dims(op, name, tensor, 1 if name in BIASES else 2, "one expert's, " + _LABELS[name].replace("E, ", ""))
    return {n: None if t is None else t[None] for n, t in weights.items()}


def aux(op: str, tensors: Sequence[Tensor], layout_names: Sequence[str]) -> None:
    extra = layout_names[len(SLOTS) :]
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
    _device(op, "w13", weights["w13"], stacks["w13"])
    for name, stack in stacks.items():  # an expanded stack holds one expert for all, and writing one would change all
        _contiguous(op, f"{name} in packed", stack, "It is overwritten in place.")
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
