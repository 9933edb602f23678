"""Gradients of ``moe``: numbers by hand, against float64, by finite differences, and what each argument does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradients import NAMES, Layer, along, found, relative, wanted
from mxfp4_ops import Activation, ExpertWeights, PackedExperts, prepare, reference
from mxfp4_ops.activation import ACTIVATIONS, Resolved, resolve
from mxfp4_ops.backends import Backend
from mxfp4_ops.moe_backward import DenseExpert, expert_backward
from problems import PROBLEMS, TINY, Problem, inputs, moe_call, weights
from test_backends import EVERY_ACTIVATION
from test_cases import rig
from torch import Tensor

OPS = torch.ops.mxfp4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = [p for p in PROBLEMS if p.intermediate < 700]
Runnable = tuple[str, Backend]


def make(
    problem: Problem,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    activation: Activation | None = None,
    *,
    weight_on_input: bool = False,
) -> Layer:
    g = torch.Generator().manual_seed(3)
    gradient = torch.randn(problem.tokens, problem.hidden, generator=g).to(dtype).to(device)
    x, ids, routing = inputs(problem, dtype, device=device)
    act = Activation(problem.activation) if activation is None else activation
    experts = weights(problem.with_(activation=act.name), device=device)
    typed = {n: t if t is None or not n.endswith("bias") else t.float() for n, t in experts.tensors().items()}
    return Layer(ExpertWeights(**typed), x, ids, routing, gradient, act, weight_on_input)


def pack(runnable: Runnable, layer: Layer) -> PackedExperts:
    return prepare(layer.experts, activation=layer.activation, prefer=runnable[1].name)


def check(runnable: Runnable, layer: Layer) -> None:
    ours, theirs = found(pack(runnable, layer), layer), wanted(layer)
    assert ours.keys() == theirs.keys()
    worst = {name: relative(ours[name], theirs[name]) for name in ours}
    rounded = runnable[1].tolerance.of(layer.x.dtype)  # the gradient of x is rounded once, to x's dtype
    ties = 1e-5 if layer.x.dtype is torch.float32 else 1e-4  # an intermediate may round the other way in float32
    assert worst.pop("x") < rounded and worst.pop("topk_weights") < ties and max([0.0, *worst.values()]) < 1e-5, worst


# --- by hand ----------------------------------------------------------------------------------------------------------

SIGMOID_2, SLOPE_2 = 0.8807970779778823, 1.0907842487848955  # sigmoid(2) and the derivative of silu at 2


def rig_layer(device: str, *, bias: bool = True) -> Layer:
    """Column 0 of the result is silu(x0) x1, at (2, 3); three tokens, slots of -1 with the worst of weights."""
    experts = rig(4)
    if bias:
        experts = replace(experts, w13_bias=torch.zeros(4, 64), w2_bias=torch.zeros(4, 32))
    experts = ExpertWeights(**{n: None if t is None else t.to(device) for n, t in experts.tensors().items()})
    x, gradient = torch.zeros(3, 32, device=device), torch.zeros(3, 32, device=device)
    x[:, 0], x[:, 1], gradient[:, 0] = 2.0, 3.0, 1.0
    ids = torch.tensor([[0, -1], [1, 2], [-1, -1]], device=device)
    routing = torch.tensor([[0.5, math.nan], [0.5, 0.25], [math.inf, math.nan]], device=device)
    return Layer(experts, x, ids, routing, gradient, Activation())


def test_b1_by_hand(runnable: Runnable) -> None:
    layer = rig_layer(runnable[0])
    got = {n: g.cpu() for n, g in found(pack(runnable, layer), layer).items()}
    by_x0, by_x1, value = 3 * SLOPE_2, 2 * SIGMOID_2, 6 * SIGMOID_2
    assert got["x"][:2, 0].tolist() == pytest.approx([0.5 * by_x0, 0.75 * by_x0], rel=1e-6)
    assert got["x"][:2, 1].tolist() == pytest.approx([0.5 * by_x1, 0.75 * by_x1], rel=1e-6)
    assert (got["x"][:, 2:] == 0).all() and (got["x"][2] == 0).all()
    assert got["topk_weights"].flatten().tolist() == pytest.approx([value, 0, value, value, 0, 0], rel=1e-6)
    assert got["w13_bias"][:, 0].tolist() == pytest.approx([0.5 * by_x0, 0.5 * by_x0, 0.25 * by_x0, 0], rel=1e-6)
    assert got["w13_bias"][:, 32].tolist() == pytest.approx([0.5 * by_x1, 0.5 * by_x1, 0.25 * by_x1, 0], rel=1e-6)
    assert got["w13_bias"].count_nonzero() == 6
    assert got["w2_bias"][:, 0].tolist() == [0.5, 0.5, 0.25, 0.0] and got["w2_bias"].count_nonzero() == 3


def test_b1_weight_on_input_by_hand(runnable: Runnable) -> None:
    """silu(w x0) w x1 at w = 0.5: the slope of silu at 1 is 0.92767, its value 0.73106."""
    layer = replace(rig_layer(runnable[0]), weight_on_input=True)
    got = {n: g.cpu() for n, g in found(pack(runnable, layer), layer).items()}
    slope, value = 0.9276705118714869, 0.7310585786300049
    assert got["x"][0, :2].tolist() == pytest.approx([0.5 * slope * 1.5, 0.5 * value], rel=1e-6)
    assert got["topk_weights"][0].tolist() == pytest.approx([slope * 2 * 1.5 + value * 3, 0], rel=1e-6)
    assert got["w13_bias"][0, 0].item() == pytest.approx(slope * 1.5, rel=1e-6)
    assert got["w2_bias"][:, 0].tolist() == [1.0, 1.0, 1.0, 0.0] and (got["x"][2] == 0).all()


def test_the_rounded_intermediate_is_the_factor_of_the_weight(runnable: Runnable) -> None:
    """silu(2) 3 = 5.28478 is 5.28125 in bfloat16, and that is what the weight multiplied; the rounding has slope 1."""
    layer = rig_layer(runnable[0])
    layer = replace(layer, x=layer.x.bfloat16(), output_gradient=layer.output_gradient.bfloat16())
    got = found(pack(runnable, layer), layer)
    assert got["topk_weights"][0].tolist() == [5.28125, 0.0]
    assert got["w13_bias"][0, 0].item() == pytest.approx(0.5 * 3 * SLOPE_2, rel=1e-6)


def test_the_same_expert_twice_counts_twice(runnable: Runnable) -> None:
    device, _ = runnable
    once = rig_layer(device)
    ids, routing = torch.zeros(3, 2, dtype=torch.int32, device=device), torch.full((3, 2), 0.5, device=device)
    twice, single = (found(pack(runnable, once), replace(once, ids=ids[:, :k], routing=routing[:, :k])) for k in (2, 1))
    for name in ("x", "w13_bias", "w2_bias"):
        torch.testing.assert_close(twice[name], 2 * single[name], rtol=1e-6, atol=0)
    torch.testing.assert_close(twice["topk_weights"], single["topk_weights"].expand(3, 2), rtol=1e-6, atol=0)


# --- against float64 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", SMALL, ids=[p.name for p in SMALL])
def test_b1_against_float64(runnable: Runnable, problem: Problem, dtype: torch.dtype) -> None:
    check(runnable, make(problem, dtype, runnable[0]))


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_activations(runnable: Runnable, activation: Activation, weight_on_input: bool) -> None:
    problem = TINY.with_(tokens=9)
    check(runnable, make(problem, device=runnable[0], activation=activation, weight_on_input=weight_on_input))


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_b1_finite_differences(runnable: Runnable, name: str, weight_on_input: bool) -> None:
    """Along three directions of one input the difference of the float64 answer is the product with our gradient."""
    layer = make(TINY, device=runnable[0], weight_on_input=weight_on_input)
    ours = found(pack(runnable, layer), layer)
    g = torch.Generator().manual_seed(5)
    for _ in range(3):
        direction = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in ours.items()}
        direction[name] = torch.randn(ours[name].shape, generator=g, dtype=torch.float64)
        size = float(ours[name].norm())
        assert float((direction[name] * ours[name].cpu()).sum()) == pytest.approx(
            along(layer, direction), abs=1e-5 * size
        )


class Expert(torch.autograd.Function):
    """One expert in float64, with our formula as its backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, weight, w13_bias, w2_bias, w13, w2, activation, on_input = args
        ctx.saved = args
        h = (x * weight if on_input else x) @ w13.t() + w13_bias
        y = activation(h) @ w2.t() + w2_bias
        return y if on_input else y * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, w13_bias, w2_bias, w13, w2, activation, on_input = ctx.saved
        dx, dweight, dw13, dw2 = expert_backward(
            grad, x, weight, DenseExpert(w13, w13_bias, w2, w2_bias), activation,
            weight_on_input=on_input, round_intermediate=False,
        )  # fmt: skip
        return dx, dweight[:, None], dw13.sum(0), dw2.sum(0), None, None, None, None


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_b1_gradcheck(name: str, weight_on_input: bool) -> None:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    activation = resolve("test", name, None, None, None)
    rows = 6 if activation.gated else 3
    leaves = [t.requires_grad_() for t in (normal(4, 5), normal(4, 1), normal(rows), normal(5))]
    constants = (normal(rows, 5), normal(5, 3), activation, weight_on_input)
    assert torch.autograd.gradcheck(lambda *a: Expert.apply(*a, *constants), leaves)


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_slopes_are_those_of_autograd(activation: Activation) -> None:
    """At ordinary points, at the clamps themselves (where torch's clamp has slope 1), beyond them, far out."""
    act = resolve("test", activation.name, activation.alpha, activation.beta, activation.limit)
    limit = act.limit if act.limit != math.inf else 3.0
    points = torch.tensor(
        [-1e30, -30.0, -8.0, -limit, -0.25, 0.0, 0.3, limit, limit + 1e-9, 8.0, 30.0, 1e30], dtype=torch.float64
    )
    h = (torch.cartesian_prod(points, points) if act.gated else points[:, None]).requires_grad_()
    (theirs,) = torch.autograd.grad(act(h).sum(), h)
    ours = act.backward(h.detach(), torch.ones(len(h), 1, dtype=torch.float64))
    finite = torch.isfinite(theirs)  # far out, autograd of a gelu is 0 times infinity
    torch.testing.assert_close(ours[finite], theirs[finite], rtol=1e-9, atol=1e-12)
    assert torch.isfinite(ours).all() and finite.float().mean() > 0.8


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_nan_stays_nan(activation: Activation) -> None:
    act: Resolved = resolve("test", activation.name, activation.alpha, activation.beta, activation.limit)
    h = torch.full((1, 2 if act.gated else 1), math.nan)
    assert act.backward(h, torch.ones(1, 1)).isnan().all()


# --- what each argument does ------------------------------------------------------------------------------------------


def backward_call(layer: Layer, packed: PackedExperts) -> tuple[list[Any], dict[str, Any]]:
    args, options = moe_call(packed, layer.x, layer.ids, layer.routing, weight_on_input=layer.weight_on_input)
    return [layer.output_gradient, *args, None, None], {**options, "output_mask": [True] * 4}


def test_a2_every_argument_of_moe_backward_matters(runnable: Runnable) -> None:
    """Changing one argument of ``moe_backward`` changes a result: none is accepted and ignored."""
    device, backend = runnable
    layer = make(TINY, device=device, activation=Activation("swigluoai", alpha=1.5, beta=0.5, limit=1.0))
    packed = pack(runnable, layer)
    args, options = backward_call(layer, packed)
    base = OPS.moe_backward(*args, **options)
    places = ["grad_output", "x", "topk_ids", "topk_weights", *layer.experts.tensors(), "aux", "expert_ids"]
    changed: dict[str, Any] = {"grad_output": args[0] + 1, "x": args[1] + 1, "topk_ids": args[2].roll(1, 0)}
    changed |= {"topk_weights": args[3] + 1, "expert_ids": torch.arange(TINY.experts).flip(0).int().to(device)}
    for name, tensor in layer.experts.tensors().items():
        assert tensor is not None
        experts = replace(layer.experts, **{name: tensor + 1 if name.endswith("bias") else tensor ^ 1})
        other = prepare(experts, activation=layer.activation, prefer=backend.name)
        slot = name if getattr(packed, name).numel() else name.removesuffix("_scale")  # native_cpu keeps scales inside
        changed[name] = (slot, getattr(other, slot))
    for name, value in changed.items():
        slot, value = value if isinstance(value, tuple) else (name, value)
        again = [value if place == slot else given for place, given in zip(places, args, strict=False)]
        assert differ(OPS.moe_backward(*again, **options), base), name
    for option, value in {"alpha": 1.0, "beta": 0.9, "limit": 0.4, "weight_on_input": True}.items():
        assert differ(OPS.moe_backward(*args, **{**options, option: value}), base), option
    silu = {"activation": "silu", "alpha": None, "beta": None}
    assert differ(OPS.moe_backward(*args, **{**options, **silu}), base)


def differ(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_mask_leaves_out_what_nobody_needs(runnable: Runnable) -> None:
    layer = make(TINY, device=runnable[0])
    args, options = backward_call(layer, pack(runnable, layer))
    everything = OPS.moe_backward(*args, **options)
    for i in range(4):
        some = OPS.moe_backward(*args, **{**options, "output_mask": [k == i for k in range(4)]})
        assert torch.equal(some[i], everything[i])
        assert all(t.shape == (0,) for k, t in enumerate(some) if k != i)


def test_batch_invariance(runnable: Runnable) -> None:
    layer = make(TINY.with_(tokens=40), device=runnable[0])
    args, options = backward_call(layer, pack(runnable, layer))
    options |= {"batch_invariant": True}
    whole = OPS.moe_backward(*args, **options)
    for t in (1, 2, 33):
        part = OPS.moe_backward(*(a[:t] for a in args[:4]), *args[4:], **options)
        assert torch.equal(part[0], whole[0][:t]) and torch.equal(part[1], whole[1][:t])


def test_expert_ids_of_two_shards_sum_to_the_whole(runnable: Runnable) -> None:
    device, backend = runnable
    layer = make(TINY, device=device)
    whole, total = found(pack(runnable, layer), layer), torch.zeros_like(layer.x)
    for rows in ([5, 0, 3], [6, 4, 1, 2]):
        shard = ExpertWeights(*(None if t is None else t[rows] for t in layer.experts.tensors().values()))
        mine = torch.tensor(rows, dtype=torch.int32, device=device)
        part = found(prepare(shard, prefer=backend.name), layer, expert_ids=mine)
        total += part["x"]
        torch.testing.assert_close(part["w13_bias"], whole["w13_bias"][rows], rtol=1e-6, atol=1e-6)
        assert (part["topk_weights"][~torch.isin(layer.ids, mine)] == 0).all()
    torch.testing.assert_close(total, whole["x"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_have_the_dtype_of_their_input(runnable: Runnable, dtype: torch.dtype) -> None:
    layer = make(TINY, device=runnable[0])
    typed = {n: t.to(dtype) if t is not None and n.endswith("bias") else t for n, t in layer.experts.tensors().items()}
    layer = replace(layer, experts=ExpertWeights(**typed), routing=layer.routing.to(dtype))
    ours, theirs = found(pack(runnable, layer), layer), wanted(layer)  # found() compares the dtypes
    for name in NAMES:
        coarse = name != "x" and dtype.itemsize == 2
        assert relative(ours[name], theirs[name]) < (3e-3 if coarse else 1e-5), name


def test_no_tokens_and_experts_without_tokens(runnable: Runnable) -> None:
    layer = make(TINY.with_(tokens=0), device=runnable[0])
    got = found(pack(runnable, layer), layer)
    assert got["x"].shape == (0, 96) and got["topk_weights"].shape == (0, 4)
    assert (got["w13_bias"] == 0).all() and (got["w2_bias"] == 0).all()
    layer = make(TINY, device=runnable[0])
    got = found(pack(runnable, layer), replace(layer, ids=torch.full_like(layer.ids, 3)))
    others = [0, 1, 2, 4, 5, 6]
    assert got["w13_bias"][3].count_nonzero() and not got["w13_bias"][others].count_nonzero()


@pytest.mark.parametrize("weight_on_input", [False, True])
def test_all_slots_and_a_mask_give_the_same(monkeypatch: pytest.MonkeyPatch, weight_on_input: bool) -> None:
    """The way of devices whose ids the host may not read, here on a CPU: NaN and Inf of other slots stay out."""
    layer = make(TINY.with_(tokens=9), weight_on_input=weight_on_input)
    skipped = layer.ids == -1
    layer.routing[skipped] = math.nan
    layer.ids[4], layer.x[4, 3], layer.routing[4] = -1, math.inf, math.inf  # a token of no expert
    layer.experts.w13_scale[6, 5], layer.ids[layer.ids == 6] = 255, 0  # an expert of no token
    args, options = backward_call(layer, prepare(layer.experts, prefer="reference"))
    plain = OPS.moe_backward(*args, **options)
    monkeypatch.setattr(reference, "host_reads_ids", lambda device: False)
    masked = OPS.moe_backward(*args, **options)
    for a, b in zip(masked, plain, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not masked[0][4].count_nonzero() and not masked[1][skipped].count_nonzero()


def test_the_same_bits_always(runnable: Runnable) -> None:
    layer = make(TINY.with_(tokens=50), torch.bfloat16, device=runnable[0])
    args, options = backward_call(layer, pack(runnable, layer))
    first = OPS.moe_backward(*args, **options)
    assert not differ(OPS.moe_backward(*args, **options), first)


def test_autocast_changes_nothing(runnable: Runnable) -> None:
    layer = make(TINY, device=runnable[0])
    packed = pack(runnable, layer)
    args, options = backward_call(layer, packed)
    plain = packed(layer.x, layer.ids, layer.routing), OPS.moe_backward(*args, **options)
    with torch.autocast(layer.x.device.type, torch.bfloat16):
        assert torch.equal(packed(layer.x, layer.ids, layer.routing), plain[0])
        assert not differ(OPS.moe_backward(*args, **options), plain[1])


if torch.cuda.is_available():  # no skip to be counted where there is no GPU

    def test_cuda_graph_of_the_backward_replays_with_new_values() -> None:
        layer = make(TINY.with_(tokens=8), device="cuda")
        args, options = backward_call(layer, prepare(layer.experts, prefer="reference"))
        OPS.moe_backward(*args, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = OPS.moe_backward(*args, **options)
        for held, new in zip(
            args[1:4], inputs(TINY.with_(tokens=8), torch.float32, seed=9, device="cuda"), strict=True
        ):
            held.copy_(new)
        graph.replay()
        assert not differ(out, OPS.moe_backward(*args, **options))
