"""The mixture of experts in plain torch, float32: what every backend must agree with."""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import Resolved
from .format import dequant


def product(rows: Tensor, weight: Tensor, batch_invariant: bool = False) -> Tensor:
    """rows [n, k] times weight [out, k] transposed; row by row where a row's bits may not depend on n."""
    if batch_invariant:
        return (
            torch.stack([(weight * row).sum(-1) for row in rows]) if len(rows) else rows.new_empty(0, weight.shape[0])
        )
    with torch.autocast(rows.device.type, enabled=False):  # it would round both factors to bfloat16
        return rows @ weight.t()


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
    activation: Resolved,
    *,
    weight_on_input: bool,
    batch_invariant: bool,
) -> Tensor:
    """Compute sum_j weight[t, j] * (W2[e] act(W13[e] x[t] + b13[e]) + b2[e]) over the experts e = ids[t, j] that are
    not -1.

    Shapes: x [T, H]; topk_ids, topk_weights [T, K]; canonical weights (``docs/layouts.md``). Returns [T, H] in x's
    dtype. Sums are float32; the activation's result is rounded once, to bfloat16, unless x is float32. With
    ``weight_on_input`` the routing weight multiplies x, that is the first product before its bias, and nothing after.
    """
    tokens, top_k = topk_ids.shape
    xs, ids, weights = x.float(), topk_ids.flatten(), topk_weights.float().flatten()
    rows = xs.new_zeros(tokens * top_k, x.shape[1])
    for e in range(w13.shape[0]):
        chosen = ids == e
        slots = slots_of(chosen)
        if slots.numel() == 0:
            continue
        weight = weights[slots, None]
        h = product(xs[slots // top_k], dequant(w13[e], w13_scale[e], torch.float32), batch_invariant)
        h = h * weight if weight_on_input else h
        a = activation(h if w13_bias is None else h + w13_bias[e].float())
        a = a if x.dtype is torch.float32 else a.to(torch.bfloat16).float()
        y = product(a, dequant(w2[e], w2_scale[e], torch.float32), batch_invariant)
        y = y if w2_bias is None else y + w2_bias[e].float()
        y = y if weight_on_input else y * weight
        rows[slots] = torch.where(chosen[slots, None], y, rows[slots])
    return rows.view(tokens, top_k, x.shape[1]).sum(1).to(x.dtype)
