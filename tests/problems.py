"""The problems that tests and benchmarks share, and an independent float64 answer to each.

Nothing here uses the package's own tables or formulas: values come from the text of the standard, activations from
float64 mathematics, so that a mistake shared by reference and kernel would show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from mxfp4_ops import Activation, ExpertWeights, PackedExperts
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Problem:
    """Sizes and options of one layer; ``name`` is the id of parametrised tests."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    tokens: int
    activation: str = "silu"
    bias: bool = True

    @property
    def gated(self) -> bool:
        return not self.activation.endswith("_no_mul")

    def with_(self, **changes: object) -> Problem:
        return replace(self, **changes)


TINY = Problem("tiny", 7, 96, 160, 4, 5)
GPT_OSS = Problem("gptoss", 2, 2880, 2880, 2, 3, activation="swigluoai")
ODD_SHARDS = tuple(Problem(f"shard{i}", 3, 192, i, 2, 4) for i in (160, 704, 928))
PROBLEMS = (
    TINY,
    TINY.with_(name="nobias", bias=False),
    Problem("one_expert", 1, 64, 64, 1, 6),
    Problem("one_block", 5, 32, 32, 3, 9),
    Problem("many_rows", 2, 128, 96, 2, 70),
    Problem("top_k_above_experts", 2, 64, 32, 5, 3),
    *ODD_SHARDS,
)


def weights(problem: Problem, seed: int = 0, low: int = 119, high: int = 123, device: str = "cpu") -> ExpertWeights:
    """Random codes, scale bytes in low..high, biases bfloat16 of size about 1/4."""
    g = torch.Generator().manual_seed(seed)
    e, h, i = problem.experts, problem.hidden, problem.intermediate
    rows = 2 * i if problem.gated else i

    def byte(*shape: int, lo: int = 0, hi: int = 255) -> Tensor:
        return torch.randint(lo, hi + 1, shape, dtype=torch.uint8, generator=g).to(device)

    def bias(*shape: int) -> Tensor | None:
        return (torch.randn(shape, generator=g) / 4).bfloat16().to(device) if problem.bias else None

    return ExpertWeights(
        byte(e, rows, h // 2),
        byte(e, rows, h // 32, lo=low, hi=high),
        bias(e, rows),
        byte(e, h, i // 2),
        byte(e, h, i // 32, lo=low, hi=high),
        bias(e, h),
    )


def inputs(
    problem: Problem, dtype: torch.dtype = torch.bfloat16, seed: int = 1, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids (some of them -1) and routing weights."""
    g = torch.Generator().manual_seed(seed)
    skip = -1 if problem.tokens > 1 else 0  # a lone token keeps an expert, so that there is a result to compare
    x = torch.randn(problem.tokens, problem.hidden, generator=g).to(dtype)
    shape = (problem.tokens, problem.top_k)
    ids = torch.randint(skip, problem.experts, shape, dtype=torch.int32, generator=g)
    return x.to(device), ids.to(device), torch.rand(shape, generator=g).to(device)


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """float64 values of canonical bytes, by ldexp on the standard's definitions."""
    blocks, scales = blocks.cpu(), scales.cpu()
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)
    factors = torch.tensor([math.ldexp(1.0, b - 127) for b in range(255)] + [math.nan], dtype=torch.float64)
    return table[codes.long()] * factors[scales.long()].repeat_interleave(32, -1)


def activate(activation: Activation, h: Tensor) -> Tensor:
    """float64 activation of h [n, S*I], gate half first."""
    name, inf = activation.name, math.inf
    g, u = h.chunk(2, -1) if not name.endswith("_no_mul") else (h, torch.ones_like(h))
    limit = activation.limit if activation.limit is not None else 7.0 if name == "swiglustep" else inf
    if name.startswith("silu"):
        g, u = torch.clamp(g, max=limit), torch.clamp(u, -limit, limit)
        return g / (1 + torch.exp(-g)) * u
    if name == "swigluoai":
        alpha = 1.702 if activation.alpha is None else activation.alpha
        beta = 1.0 if activation.beta is None else activation.beta
        g, u = torch.clamp(g, max=limit), torch.clamp(u, -limit, limit)
        return g / (1 + torch.exp(-alpha * g)) * (u + beta)
    if name == "swiglustep":
        return torch.clamp(g / (1 + torch.exp(-g)), max=limit) * torch.clamp(u, -limit, limit)
    if name == "situ":
        alpha = 4.0 if activation.alpha is None else activation.alpha
        beta = 25.0 if activation.beta is None else activation.beta
        return alpha * torch.tanh(g / alpha) / (1 + torch.exp(-g)) * (u if beta == inf else beta * torch.tanh(u / beta))
    if name == "relu2_no_mul":
        return torch.clamp(g, min=0) ** 2
    if name.startswith("gelu_tanh"):
        return 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
    return 0.5 * g * (1 + torch.erf(g / math.sqrt(2))) * u


def answer(
    experts: ExpertWeights,
    x: Tensor,
    ids: Tensor,
    routing: Tensor,
    activation: Activation,
    *,
    weight_on_input: bool = False,
    round_intermediate: bool = False,
) -> Tensor:
    """The layer in float64: [T, H]. Nothing is rounded, or the intermediate to bfloat16, straight through."""
    x, ids, routing = x.cpu().double(), ids.cpu(), routing.cpu().double()
    out = torch.zeros_like(x)
    for e in range(experts.w13.shape[0]):
        t, slot = (ids == e).nonzero(as_tuple=True)
        if len(t) == 0:
            continue
        w = routing[t, slot, None]
        h = (x[t] * w if weight_on_input else x[t]) @ decode(experts.w13[e], experts.w13_scale[e]).T
        h = h if experts.w13_bias is None else h + experts.w13_bias[e].cpu().double()
        a = activate(activation, h)
        a = a + (a.bfloat16().double() - a).detach() if round_intermediate else a
        y = a @ decode(experts.w2[e], experts.w2_scale[e]).T
        y = y if experts.w2_bias is None else y + experts.w2_bias[e].cpu().double()
        out.index_add_(0, t, y if weight_on_input else w * y)
    return out


def errors(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Relative L2 error of the whole and of the worst row, against rows of typical size."""
    difference, wanted = found.cpu().double() - wanted, wanted
    typical = wanted.norm() / math.sqrt(max(len(wanted), 1))
    worst = (difference.norm(dim=1) / torch.maximum(wanted.norm(dim=1), typical)).max()
    return float(difference.norm() / wanted.norm()), float(worst)


def moe_call(
    packed: PackedExperts, x: Tensor, ids: Tensor, routing: Tensor, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """Arguments of ``torch.ops.mxfp4.moe`` for packed experts."""
    p = packed
    args = (x, ids, routing, p.w13, p.w13_scale, p.w13_bias, p.w2, p.w2_scale, p.w2_bias, list(p.aux))
    sizes = {"layout": p.layout, "hidden": p.hidden, "intermediate": p.intermediate, "activation": p.activation}
    return args, {**sizes, "alpha": p.alpha, "beta": p.beta, "limit": p.limit, **kwargs}
