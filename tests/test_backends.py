"""One suite over all backends: the float64 answer, every argument, extremes, poisoned memory, the same bits twice."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import backends_for
from mxfp4_ops import ACTIVATIONS, Activation, ExpertWeights, PackedExperts, prepare
from mxfp4_ops.backends import Backend
from problems import GPT_OSS, PROBLEMS, TINY, Problem, answer, errors, inputs, weights
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Runnable = tuple[str, Backend]


def pack(backend: Backend, experts: ExpertWeights, activation: Activation | str = "silu") -> PackedExperts:
    return prepare(experts, activation=activation, prefer=backend.name)


def check(backend: Backend, out: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert out.dtype is dtype and out.is_contiguous() and out.shape == wanted.shape
    whole, worst = errors(out, wanted)
    bound = backend.tolerance.of(dtype)
    assert whole < bound and worst < bound * backend.tolerance.worst_row, (whole, worst, bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=[p.name for p in PROBLEMS])
def test_against_float64(runnable: Runnable, problem: Problem, dtype: torch.dtype) -> None:
    device, backend = runnable
    experts, args = weights(problem, device=device), inputs(problem, dtype, device=device)
    out = pack(backend, experts, problem.activation)(*args)
    check(backend, out, answer(experts, *args, Activation(problem.activation)), dtype)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_gpt_oss_sizes(runnable: Runnable, tokens: int) -> None:
    device, backend = runnable
    problem, activation = GPT_OSS.with_(tokens=tokens), Activation("swigluoai", limit=7.0)
    experts, args = weights(problem, device=device), inputs(problem, device=device)
    check(backend, pack(backend, experts, activation)(*args), answer(experts, *args, activation), torch.bfloat16)


EVERY_ACTIVATION = [
    *(Activation(name) for name in ACTIVATIONS),
    Activation("silu", limit=0.5),
    Activation("swigluoai", alpha=1.1, beta=0.3, limit=0.75),
    Activation("swiglustep", limit=0.25),
    Activation("swiglustep", limit=math.inf),
    Activation("situ", alpha=0.5, beta=0.75),
    Activation("situ", beta=math.inf),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_a1_activations(runnable: Runnable, activation: Activation, dtype: torch.dtype) -> None:
    device, backend = runnable
    problem = TINY.with_(activation=activation.name, tokens=9)
    experts, args = weights(problem, device=device), inputs(problem, dtype, device=device)
    check(backend, pack(backend, experts, activation)(*args), answer(experts, *args, activation), dtype)


def test_a2_every_argument_matters(runnable: Runnable) -> None:
    """Changing one argument changes the result: none is accepted and ignored."""
    device, backend = runnable
    experts, (x, ids, routing) = weights(TINY, device=device), inputs(TINY, device=device)
    base_activation = Activation("swigluoai", alpha=1.5, beta=0.5, limit=1.0)
    base = pack(backend, experts, base_activation)
    out = base(x, ids, routing)
    for change in ({"alpha": 1.0}, {"beta": 0.9}, {"limit": 0.4}, {"name": "silu", "alpha": None, "beta": None}):
        other = Activation(**{**vars(base_activation), **change})
        assert not torch.equal(pack(backend, experts, other)(x, ids, routing), out), change
    for name, tensor in experts.tensors().items():
        assert tensor is not None
        changed = tensor + 1 if name.endswith("bias") else tensor ^ 1
        other_experts = ExpertWeights(**{**experts.tensors(), name: changed})
        assert not torch.equal(pack(backend, other_experts, base_activation)(x, ids, routing), out), name
    assert not torch.equal(base(x + 1, ids, routing), out)
    assert not torch.equal(base(x, ids.roll(1, 0), routing), out)
    assert not torch.equal(base(x, ids, routing + 1), out)
    assert not torch.equal(base(x, ids, routing, weight_on_input=True), out)
    order = torch.arange(TINY.experts, dtype=torch.int32, device=device).flip(0)
    assert not torch.equal(base(x, ids, routing, expert_ids=order), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weight_on_input(runnable: Runnable, dtype: torch.dtype) -> None:
    device, backend = runnable
    experts, args = weights(TINY, device=device), inputs(TINY, dtype, device=device)
    out = pack(backend, experts)(*args, weight_on_input=True)
    check(backend, out, answer(experts, *args, Activation(), weight_on_input=True), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_biases_and_routing_weights_of_any_float_dtype(runnable: Runnable, dtype: torch.dtype) -> None:
    device, backend = runnable
    experts, (x, ids, routing) = weights(TINY, device=device), inputs(TINY, torch.float32, device=device)
    typed = ExpertWeights(
        **{n: t.to(dtype) if n.endswith("bias") and t is not None else t for n, t in experts.tensors().items()}
    )
    out = pack(backend, typed)(x, ids, routing.to(dtype))
    check(backend, out, answer(typed, x, ids, routing.to(dtype), Activation()), torch.float32)


def test_r3_expert_ids_of_two_shards_sum_to_the_whole(runnable: Runnable) -> None:
    device, backend = runnable
    experts, (x, ids, routing) = weights(TINY, device=device), inputs(TINY, torch.float32, device=device)
    whole = pack(backend, experts)(x, ids, routing)
    total = torch.zeros_like(whole)
    for rows in ([5, 0, 3], [6, 4, 1, 2]):
        shard = ExpertWeights(*(None if t is None else t[rows] for t in experts.tensors().values()))
        mine = torch.tensor(rows, dtype=torch.int32, device=device)
        total += pack(backend, shard)(x, ids, routing, expert_ids=mine)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)
    nobody = torch.arange(100, 107, dtype=torch.int32, device=device)
    assert torch.equal(pack(backend, experts)(x, ids, routing, expert_ids=nobody), torch.zeros_like(whole))


def selector(scale13: int, scale2: int, experts: int = 1) -> ExpertWeights:
    """w13 reads x[0] into the gate and x[1] into the up half, all codes 1.0 and 0; relu2 and silu make it plain."""
    w13 = torch.zeros(experts, 64, 16, dtype=torch.uint8)
    w13[:, 0, 0], w13[:, 32, 0] = 0x02, 0x20
    w2 = torch.zeros(experts, 32, 16, dtype=torch.uint8)
    w2[:, 0, 0] = 0x02
    filled = [torch.full((experts, rows, 1), s, dtype=torch.uint8) for rows, s in ((64, scale13), (32, scale2))]
    return ExpertWeights(w13, filled[0], None, w2, filled[1], None)


EXTREMES = {
    "wide_range": [30000.0, 0.5],
    "tiny_beside_one": [2.0**-130, 1.0],
    "huge": [2.0**120, 2.0**-100],
    "inf": [math.inf, 1.0],
    "nan": [1.0, math.nan],
}


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("row", EXTREMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_extreme_rows_of_x(runnable: Runnable, row: str, dtype: torch.dtype, tokens: int) -> None:
    """Each element keeps its own precision beside any other, and a bad row stays alone among good ones."""
    device, backend = runnable
    ungated = {
        "w13": torch.zeros(1, 32, 16, dtype=torch.uint8),
        "w13_scale": torch.full((1, 32, 1), 127, dtype=torch.uint8),
    }
    ungated["w13"][0, 0, 0], ungated["w13"][0, 1, 0] = 0x02, 0x20  # intermediate 0 reads x[0], 1 reads x[1]
    w2 = torch.zeros(1, 32, 16, dtype=torch.uint8)
    w2[0, 0, 0], w2[0, 1, 0] = 0x02, 0x20
    experts = ExpertWeights(
        **{k: v.to(device) for k, v in ungated.items()},
        w13_bias=None,
        w2=w2.to(device),
        w2_scale=torch.full((1, 32, 1), 127, dtype=torch.uint8, device=device),
        w2_bias=None,
    )
    x = torch.zeros(tokens, 32, device=device)
    x[:, 0] = 1.0
    x[tokens // 2, :2] = torch.tensor(EXTREMES[row], device=device)
    x = x.to(dtype)
    args = (x, torch.zeros(tokens, 1, dtype=torch.int64, device=device), torch.ones(tokens, 1, device=device))
    out = pack(backend, experts, "silu_no_mul")(*args).cpu().double()
    wanted = answer(experts, *args, Activation("silu_no_mul"))
    ours, theirs = out[:, :2], wanted[:, :2]
    finite = torch.isfinite(theirs)
    assert torch.equal(torch.isnan(ours), torch.isnan(theirs)) and torch.equal(torch.isinf(ours), torch.isinf(theirs))
    error = (ours - theirs).abs()[finite] / theirs.abs()[finite].clamp_min(2.0**-149)
    assert (error < (2.0**-7 if dtype is torch.bfloat16 else 2.0**-20)).all(), error


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("scale", [0, 1, 2, 64, 190, 250, 251, 252, 253, 254, 255])
def test_extreme_scale_bytes(runnable: Runnable, scale: int, tokens: int) -> None:
    """x carries the inverse power of two, so that the product is of size one, in w13 and in w2."""
    device, backend = runnable
    for dtype in (torch.bfloat16, torch.float32):
        first = min(max(2.0 ** (127 - scale), 2.0**-126), 2.0**126)
        x = torch.zeros(tokens, 32)
        x[:, 0], x[:, 1] = first, first
        scales13 = ExpertWeights(
            *(None if t is None else t.to(device) for t in selector(scale, 127).tensors().values())
        )
        args = (
            x.to(dtype).to(device),
            torch.zeros(tokens, 1, dtype=torch.int64, device=device),
            torch.ones(tokens, 1, device=device),
        )
        for activation in ("silu", "swiglustep"):
            out = pack(backend, scales13, activation)(*args).cpu().double()
            wanted = answer(scales13, *args, Activation(activation))
            assert torch.allclose(out, wanted, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=0, equal_nan=True)
        scales2 = ExpertWeights(*(None if t is None else t.to(device) for t in selector(127, scale).tensors().values()))
        x[:, :2] = 2.0 ** ((127 - scale) // 2)
        out = pack(backend, scales2)(x.to(dtype).to(device), *args[1:]).cpu().double()
        wanted = answer(scales2, x.to(dtype), *args[1:], Activation()).to(dtype).double()
        assert torch.allclose(out, wanted, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_g1_poisoned_memory_changes_nothing(runnable: Runnable, dtype: torch.dtype) -> None:
    device, backend = runnable
    for problem in (TINY, TINY.with_(tokens=70)):
        packed, args = pack(backend, weights(problem, device=device)), inputs(problem, dtype, device=device)
        plain = packed(*args)
        torch.use_deterministic_algorithms(True)  # torch.empty now returns NaN
        try:
            poisoned = packed(*args)
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.isfinite(plain).all() and torch.equal(plain, poisoned)


def test_g2_the_same_bits_always(runnable: Runnable) -> None:
    """Again, after other sizes and dtypes and no tokens in between, and with another number of threads."""
    device, backend = runnable
    packed, other = (pack(backend, weights(p, device=device)) for p in (TINY, TINY.with_(hidden=128, experts=2)))
    big = TINY.with_(tokens=50)
    args, many = inputs(TINY, device=device), inputs(big, device=device)
    first, whole = packed(*args), packed(*many)
    for dtype in DTYPES:
        other(*inputs(TINY.with_(hidden=128, experts=2, tokens=11), dtype, device=device))
        packed(*inputs(TINY.with_(tokens=0), dtype, device=device))
        assert torch.equal(packed(*args), first) and torch.equal(packed(*many), whole)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(packed(*args), first) and torch.equal(packed(*many), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_n8_batch_invariance(runnable: Runnable, dtype: torch.dtype) -> None:
    device, backend = runnable
    problem = TINY.with_(tokens=64)
    packed, (x, ids, routing) = pack(backend, weights(problem, device=device)), inputs(problem, dtype, device=device)
    whole = packed(x, ids, routing, batch_invariant=True)
    for t in (1, 2, 5, 33):
        assert torch.equal(packed(x[:t], ids[:t], routing[:t], batch_invariant=True), whole[:t])
    order = torch.randperm(64, device=device)
    assert torch.equal(packed(x[order], ids[order], routing[order], batch_invariant=True), whole[order])


def test_r6_splitting_tokens_is_concatenating(runnable: Runnable) -> None:
    device, backend = runnable
    problem = TINY.with_(tokens=64)
    packed, args = pack(backend, weights(problem, device=device)), inputs(problem, torch.float32, device=device)
    parts = [packed(*(a[i : i + 3] for a in args)) for i in range(0, 64, 3)]
    torch.testing.assert_close(torch.cat(parts), packed(*args), rtol=1e-5, atol=1e-5)


def test_permuting_experts_with_their_ids_changes_nothing(runnable: Runnable) -> None:
    device, backend = runnable
    experts, (x, ids, routing) = weights(TINY, device=device), inputs(TINY, device=device)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4], device=device)
    moved = ExpertWeights(*(None if t is None else t[order] for t in experts.tensors().values()))
    place = torch.cat([order.argsort(), torch.tensor([-1], device=device)])
    out = pack(backend, moved)(x, place[ids.long()], routing)
    assert torch.equal(out, pack(backend, experts)(x, ids, routing))


@pytest.mark.parametrize("experts,top_k", [(4096, 32), (33, 7), (1, 32)])
def test_r6_many_experts_and_large_top_k(runnable: Runnable, experts: int, top_k: int) -> None:
    device, backend = runnable
    problem = Problem("p", experts, 32, 32, top_k, 3)
    w, args = weights(problem, device=device), inputs(problem, torch.float32, device=device)
    check(backend, pack(backend, w)(*args), answer(w, *args, Activation()), torch.float32)


def test_a5_fp16_callers_do_not_overflow_between_the_products(runnable: Runnable) -> None:
    """The intermediate is 2^18 in float16's face; the result is of size one."""
    device, backend = runnable
    experts = ExpertWeights(*(None if t is None else t.to(device) for t in selector(136, 109).tensors().values()))
    x = torch.zeros(2, 32, dtype=torch.float16, device=device)
    x[:, :2] = 1.0
    out = pack(backend, experts)(
        x, torch.zeros(2, 1, dtype=torch.int64, device=device), torch.ones(2, 1, device=device)
    )
    assert out[:, 0].tolist() == pytest.approx([1.0, 1.0], rel=5e-3)


@pytest.mark.parametrize("bad", [2**32, 2**31, -(2**32)])
def test_r7_ids_are_not_cut_to_32_bits(bad: int) -> None:
    """2^32 is expert 0 in its low half: it has to be refused as it is."""
    for backend in backends_for("cpu"):
        x, _, routing = inputs(TINY)
        with pytest.raises(ValueError, match=f"topk_ids must be .*, got {bad}"):
            pack(backend, weights(TINY))(x, torch.full(routing.shape, bad), routing)


def test_inference_mode_and_no_grad(runnable: Runnable) -> None:
    device, backend = runnable
    packed, args = pack(backend, weights(TINY, device=device)), inputs(TINY, device=device)
    plain = packed(*args)
    with torch.inference_mode():
        assert torch.equal(packed(*args), plain)
    with torch.no_grad():
        assert torch.equal(packed(args[0].requires_grad_(), *args[1:]), plain)
