"""The mixture of experts in plain torch, float32: what every backend must agree with."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch
from torch import Tensor

from .activation import Resolved
from .format import dequant
from .x_formats import expand_x, round_static, round_x


def product(rows: Tensor, weight: Tensor, batch_invariant: bool = False) -> Tensor:
    """rows [n, k] times weight [out, k] transposed; row by row where a row's bits may not depend on n."""
    if batch_invariant:
        return torch.stack([(weight * row).sum(-1) for row in rows])
    device = rows.device.type
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        return rows @ weight.t()  # autocast would round both factors to bfloat16


def _activate(activation: Resolved, h: Tensor, batch_invariant: bool) -> Tensor:
    """The activation of h [n, S*I]; row by row as well: torch's vector and scalar gelu and sigmoid differ in the last
    bit, and n decides which element meets which."""
    return torch.stack([activation(row) for row in h]) if batch_invariant else activation(h)


def _entered(rows: Tensor, x_format: str, input_scale: Tensor | None) -> Tensor:
    """float32 rows as they enter a product."""
    if x_format == "none":
        return rows
    return round_x(rows, x_format) if input_scale is None else round_static(rows, input_scale)


def _first_product(
    rows: Tensor, weight: Tensor | None, w13: Tensor, x_format: str, input_scale: Tensor | None, batch_invariant: bool
) -> Tensor:
    """W13 times rows, each times its routing weight if there is one: before it is rounded, where it is."""
    if weight is None:
        return product(_entered(rows, x_format, input_scale), w13, batch_invariant)
    if x_format == "none":
        return product(rows, w13, batch_invariant) * weight
    return product(_entered(rows * weight, x_format, input_scale), w13, batch_invariant)


def host_reads_ids(device: torch.device) -> bool:
    """Whether sizes may depend on ids: not where kernels are captured in graphs."""
    return device.type == "cpu"


def slots_of(chosen: Tensor) -> Tensor:
    """The slots that one expert's turn works on, of chosen [T*K] bool.

    On a CPU only the expert's own. Elsewhere each expert runs over all slots, and its caller masks out those not
    chosen: slow, and right.
    """
    if host_reads_ids(chosen.device):
        return chosen.nonzero()[:, 0]
    return torch.arange(chosen.numel(), device=chosen.device)


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_bias: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor,
    w2_bias: Tensor | None,
    w13_input_scale: Tensor | None = None,
    w2_input_scale: Tensor | None = None,
    *,
    x_scale: Tensor | None,
    activation: Resolved,
    x_format: str,
    weight_on_input: bool,
    batch_invariant: bool,
) -> Tensor:
    """Compute sum_j weight[t, j] * (W2[e] act(W13[e] x[t] + b13[e]) + b2[e]) over the experts e = ids[t, j] that are
    not -1.

    Shapes: x [T, H], or quantized with x_scale; topk_ids, topk_weights [T, K]; canonical weights (``docs/layouts.md``).
    Returns [T, H] in x's dtype, bfloat16 for quantized x. Sums are float32. With ``x_format`` "none" the activation's
    result is rounded once, to bfloat16, unless x is float32; otherwise as x is, from float32. With ``weight_on_input``
    the routing weight multiplies x, before it is rounded, and nothing after; x that came quantized is not rounded
    again, there it multiplies the product.
    """
    tokens, top_k = topk_ids.shape
    hidden, dtype = w2.shape[1], x.dtype if x_scale is None else torch.bfloat16
    xs = x.float() if x_scale is None else expand_x(x, x_scale, x_format, hidden)
    first_format = x_format if x_scale is None else "none"
    ids, weights = topk_ids.flatten(), topk_weights.float().flatten()
    rows = xs.new_zeros(tokens * top_k, hidden)
    for e in range(w13.shape[0]):
        chosen = ids == e
        slots = slots_of(chosen)
        if slots.numel() == 0:
            continue
        weight = weights[slots, None]
        scale13, scale2 = (None if s is None else s[e] for s in (w13_input_scale, w2_input_scale))
        up = dequant(w13[e], w13_scale[e], torch.float32)
        on_input = weight if weight_on_input else None
        h = _first_product(xs[slots // top_k], on_input, up, first_format, scale13, batch_invariant)
        a = _activate(activation, h if w13_bias is None else h + w13_bias[e].float(), batch_invariant)
        if x_format == "none" and dtype is not torch.float32:
            a = a.to(torch.bfloat16).float()
        down = dequant(w2[e], w2_scale[e], torch.float32)
        y = product(_entered(a, x_format, scale2), down, batch_invariant)
        y = y if w2_bias is None else y + w2_bias[e].float()
        y = y if weight_on_input else y * weight
        rows[slots] = torch.where(chosen[slots, None], y, rows[slots])
    # Slot after slot: the order of additions in a reduction may depend on the number of tokens.
    return functools.reduce(torch.add, rows.view(tokens, top_k, hidden).unbind(1)).to(dtype)
