"""What is timed: our backends, and a torch loop over weights that were expanded beforehand."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from mxfp4_ops import Activation, ExpertWeights, dequant_mxfp4, prepare
from torch import Tensor

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(backend: str, experts: ExpertWeights, activation: Activation, **options: bool) -> Layer:
    """The op on packed weights."""
    packed = prepare(experts, activation=activation, prefer=backend)
    return lambda x, ids, routing: packed(x, ids, routing, **options)


def torch_loop(dtype: torch.dtype, experts: ExpertWeights, activation: Activation) -> Layer:
    """Expand all experts once to ``dtype``, then at each call one F.linear pair for each expert that has tokens.

    This is what a user without a packed kernel writes; it needs 3.8 (bfloat16) or 7.5 (float32) times the memory.
    """
    w13 = torch.stack([dequant_mxfp4(w, s, dtype) for w, s in zip(experts.w13, experts.w13_scale, strict=True)])
    w2 = torch.stack([dequant_mxfp4(w, s, dtype) for w, s in zip(experts.w2, experts.w2_scale, strict=True)])
    b13, b2 = (None if b is None else b.to(dtype) for b in (experts.w13_bias, experts.w2_bias))
    act = _torch_activation(activation)

    def run(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        flat, weight = ids.flatten(), routing.flatten()
        order = flat.argsort()
        out = torch.zeros(x.shape, dtype=torch.float32)
        start = 0
        for e, count in enumerate(torch.bincount(flat, minlength=len(w13)).tolist()):
            if count:
                slots = order[start : start + count]
                start += count
                token = slots // ids.shape[1]
                h = F.linear(x[token].to(dtype), w13[e], None if b13 is None else b13[e])
                y = F.linear(act(h), w2[e], None if b2 is None else b2[e])
                out.index_add_(0, token, y.float() * weight[slots, None])
        return out.to(x.dtype)

    return run


def _torch_activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    limit = float("inf") if activation.limit is None else activation.limit

    def swigluoai(h: Tensor) -> Tensor:
        g, u = h.chunk(2, -1)
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return g * torch.sigmoid(1.702 * g) * (u + 1)

    def silu(h: Tensor) -> Tensor:
        g, u = h.chunk(2, -1)
        return F.silu(g) * u

    return {"swigluoai": swigluoai, "silu": silu}[activation.name]
