"""Routing: numbers worked out by hand, an independent float64 answer, ties, special values, every argument."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mxfp4_ops import route, routing
from mxfp4_ops.routing import METHODS
from torch import Tensor

NAN, INF = math.nan, math.inf
SIZES = ((1, 1, 3), (7, 3, 40), (128, 8, 64), (384, 6, 40), (4096, 32, 5), (40, 40, 6))
LN3 = math.log(3.0)


def options_of(method: str, **options: Any) -> dict[str, Any]:
    fixed = METHODS[method].renormalize
    return {"method": method, **({} if fixed is None else {"renormalize": fixed}), **options}


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_softmax_topk(device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 4.0]], device=device).log()  # softmax: .1, .3, .2, .4
    ids, weights = route(logits, 2, renormalize=False, scale=10.0)
    assert ids.tolist() == [[3, 1]] and ids.dtype is torch.int32 and weights.dtype is torch.float32
    assert weights[0].tolist() == pytest.approx([4.0, 3.0], rel=1e-6)
    assert route(logits, 2)[1][0].tolist() == pytest.approx([4 / 7, 3 / 7], rel=1e-6)
    assert route(logits, 2, "topk_softmax")[1][0].tolist() == pytest.approx([4 / 7, 3 / 7], rel=1e-6)
    bias = torch.tensor([0.25, 0.0, 0.25, -1.0], device=device)  # choice: .35, .3, .45, -.6
    ids, weights = route(logits, 2, correction_bias=bias, renormalize=False)
    assert ids.tolist() == [[2, 0]] and weights[0].tolist() == pytest.approx([0.2, 0.1], rel=1e-6)
    # Groups {0, 1} and {2, 3}: by their best, .3 < .4; with a bias by sums, .35 + .35 > .2 + .4.
    assert sorted(route(logits, 2, groups=2)[0][0].tolist()) == [2, 3]
    bias = torch.tensor([0.25, 0.05, 0.0, 0.0], device=device)
    assert sorted(route(logits, 2, groups=2, correction_bias=bias)[0][0].tolist()) == [0, 1]


def test_sigmoid_topk(device: str) -> None:
    # sigmoid(0) = 1/2, sigmoid(ln 3) = 3/4, sigmoid(-ln 3) = 1/4
    logits = torch.tensor([[0.0, LN3, -LN3, 0.0, -LN3, LN3]], device=device)
    ids, weights = route(logits, 3, "sigmoid_topk", scale=2.0)  # 3/4, 3/4, 1/2; the sum is 2
    assert ids.tolist() == [[1, 5, 0]]
    assert weights[0].tolist() == pytest.approx([0.75, 0.75, 0.5], rel=1e-6)
    bias = torch.tensor([0.0, -1.0, 1.0, 0.0, 0.0, 0.0], device=device)  # choice: .5, -.25, 1.25, .5, .25, .75
    ids, weights = route(logits, 2, "sigmoid_topk", correction_bias=bias, renormalize=False)
    assert ids.tolist() == [[2, 5]] and weights[0].tolist() == pytest.approx([0.25, 0.75], rel=1e-6)
    # Groups of three: best two 1.25 + .5 against .75 + .5, so 0..2 stay, and expert 5 can not be chosen.
    ids, weights = route(logits, 2, "sigmoid_topk", correction_bias=bias, groups=2)
    assert ids.tolist() == [[2, 0]] and weights[0].tolist() == pytest.approx([1 / 3, 2 / 3], rel=1e-6)


def test_topk_sigmoid(device: str) -> None:
    logits = torch.tensor([[0.0, LN3, -LN3]], device=device)
    ids, weights = route(logits, 1, "topk_sigmoid", renormalize=False)
    assert ids.tolist() == [[1]] and weights.tolist() == [[pytest.approx(0.75, rel=1e-6)]]


def test_sqrtsoftplus_topk(device: str) -> None:
    # log(1 + e^x) is ln 2, ln 4, ln 10 for x = 0, ln 3, ln 9; for 100 it is 100, for -100 it is e^-100
    logits = torch.tensor([[0.0, LN3, math.log(9.0), 100.0, -100.0]], device=device)
    roots = [math.sqrt(math.log(2)), math.sqrt(math.log(4)), math.sqrt(math.log(10)), 10.0, math.exp(-50)]
    ids, weights = route(logits, 5, "sqrtsoftplus_topk", renormalize=False, scale=1.5)
    assert ids.tolist() == [[3, 2, 1, 0, 4]]
    assert weights[0].tolist() == pytest.approx([1.5 * roots[i] for i in (3, 2, 1, 0, 4)], rel=1e-6)
    bias = torch.tensor([20.0, 0.0, 0.0, 0.0, 30.0], device=device)
    ids, weights = route(logits, 2, "sqrtsoftplus_topk", correction_bias=bias)
    assert ids.tolist() == [[4, 0]]
    assert weights[0].tolist() == pytest.approx([roots[4] / roots[0], 1.0], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hash_table(device: str, dtype: torch.dtype) -> None:
    """The table's order stands, repeats count twice, and the logits only weigh."""
    logits = torch.tensor([[0.0, LN3, math.log(9.0)]] * 3, device=device)
    table = torch.tensor([[0, 1], [2, 0], [1, 1]], dtype=dtype, device=device)
    tokens = torch.tensor([1, 0, 2], dtype=dtype, device=device)
    ids, weights = route(logits, 2, "sqrtsoftplus_topk", input_ids=tokens, hash_table=table, scale=2.0)
    a, b, c = (math.sqrt(math.log(n)) for n in (2, 4, 10))
    assert ids.tolist() == [[2, 0], [0, 1], [1, 1]] and ids.dtype is torch.int32
    want = [[2 * c / (a + c), 2 * a / (a + c)], [2 * a / (a + b), 2 * b / (a + b)], [1.0, 1.0]]
    torch.testing.assert_close(weights.cpu(), torch.tensor(want), rtol=1e-6, atol=0)


def test_a_given_minus_one_has_weight_zero() -> None:
    """What a lookup out of range becomes where data may not be read, in the definition and in the compiled leaf."""
    logits, given = torch.zeros(1, 4), torch.tensor([[-1, 3]], dtype=torch.int32)
    plain = routing.route(logits, None, given, 2, score="sigmoid", groups=1, topk_groups=1, renormalize=True, scale=2.0)
    for ids, weights in (plain, torch.ops.mxfp4._native_route(logits, None, given, 2, 1, 1, 1, True, 2.0)):
        assert ids.tolist() == [[-1, 3]] and weights.tolist() == [[0.0, 2.0]]


# --- ties and special values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_ties_go_to_the_lower_index(device: str, method: str) -> None:
    options = options_of(method)
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 0.0]], device=device)
    assert route(logits, 5, **options)[0].tolist() == [[1, 3, 0, 2, 4]]
    assert route(torch.zeros(2, 64, device=device), 32, **options)[0].tolist() == [list(range(32))] * 2
    close = torch.tensor([[20.0, 20.000002]], device=device)  # one sigmoid, one softmax share in fp32
    assert route(close, 1, **options)[0].tolist() == [[1]]
    if METHODS[method].bias:
        tie = {"correction_bias": torch.zeros(5, device=device), **options}
        assert route(logits, 5, **tie)[0].tolist() == [[1, 3, 0, 2, 4]]
    if METHODS[method].groups:
        tie = {"groups": 4, "topk_groups": 2, **options}
        assert route(torch.zeros(1, 8, device=device), 3, **tie)[0].tolist() == [[0, 1, 2]]
        last = torch.tensor([[0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]], device=device)
        assert route(last, 3, **tie)[0].tolist() == [[2, 4, 3]]  # groups 1 and 2, not 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("biased", [False, True])
def test_nan_and_infinite_logits(device: str, method: str, biased: bool) -> None:
    options = options_of(method)
    if biased and METHODS[method].bias:
        options["correction_bias"] = torch.zeros(4, device=device)
    rows = [[NAN, 1.0, 3.0, 2.0], [NAN] * 4, [-INF] * 4, [-INF, 0.0, -INF, -INF], [0.0] * 4, [INF, 0.0, -INF, 1.0]]
    ids, weights = route(torch.tensor(rows, device=device), 3, **options)
    assert all(len(set(row)) == 3 and set(row) <= set(range(4)) for row in ids.tolist())
    assert ids[1:5].tolist() == [[0, 1, 2], [0, 1, 2], [1, 0, 2], [0, 1, 2]]
    assert weights[:2].isnan().all(), "a NaN shows in all weights of its token"
    assert weights[2].tolist() == [0.0] * 3, "no expert has a score"
    assert weights[3, 1:].tolist() == [0.0] * 2 and weights[3, 0] > 0
    assert weights[4].isfinite().all()
    if not (biased and METHODS[method].score == "softmax"):
        assert ids[0].tolist() == [2, 3, 1]
        assert ids[5].tolist() == [0, 3, 1]


@pytest.mark.parametrize("method", ["sigmoid_topk", "sqrtsoftplus_topk"])
def test_scores_that_underflow_give_no_nan(device: str, method: str) -> None:
    ids, weights = route(torch.tensor([[-300.0, -250.0, -400.0]], device=device), 2, method)
    assert ids.tolist() == [[1, 0]] and weights.tolist() == [[0.0, 0.0]]


def test_finite_logits_never_give_nan(device: str) -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[largest, -largest, 0.0, 1e30], [-largest] * 4, [largest] * 4], device=device)
    for method in METHODS:
        assert route(logits, 3, **options_of(method))[1].isfinite().all()


# --- against float64 --------------------------------------------------------------------------------------------------


def scores64(row: list[float], score: str) -> list[float]:
    if score == "softmax":
        largest = max(row)
        total = math.fsum(math.exp(x - largest) for x in row)
        return [math.exp(x - largest) / total for x in row]
    if score == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in row]
    return [math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x)))) for x in row]


def allowed64(choice: list[float], groups: int, topk_groups: int, best: int) -> list[int]:
    """Experts of the groups whose ``best`` highest choices have the highest sums."""
    size = len(choice) // groups
    sums = [sum(sorted(choice[g * size : (g + 1) * size])[-best:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: (-sums[g], g))[:topk_groups]
    return [e for e in range(len(choice)) if e // size in kept]


def near(a: float, b: float) -> bool:
    return abs(a - b) <= 4e-6 * max(1.0, abs(a))


@pytest.mark.parametrize(("experts", "top_k", "tokens"), SIZES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("biased", [False, True])
def test_against_float64(device: str, method: str, biased: bool, experts: int, top_k: int, tokens: int) -> None:
    """Ids are exact without a bias; with one, a choice may differ where float64 sees a difference below 4e-6."""
    known = METHODS[method]
    if biased and not known.bias:
        biased = False
    g = torch.Generator().manual_seed(experts)
    logits = torch.randn(tokens, experts, generator=g) * 3
    bias = torch.rand(experts, generator=g) / 4 if biased else None
    grouped = known.groups and experts % 8 == 0 and experts >= 4 * top_k
    options = options_of(method, groups=8, topk_groups=3) if grouped else options_of(method)
    placed = None if bias is None else bias.to(device)
    ids, weights = route(logits.to(device), top_k, correction_bias=placed, scale=2.5, **options)
    for row, chosen, found in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        scores = scores64(row, known.score)
        choice = [s + b for s, b in zip(scores, bias.tolist(), strict=True)] if bias is not None else row
        allowed = allowed64(choice, *((8, 3) if grouped else (1, 1)), best=2 if biased else 1)
        want = sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]
        assert len(set(chosen)) == top_k
        assert chosen == want or (biased and all(near(choice[a], choice[b]) for a, b in zip(chosen, want, strict=True)))
        divisor = math.fsum(scores[e] for e in chosen) if options.get("renormalize", True) else 1.0
        assert found == pytest.approx([2.5 * scores[e] / divisor for e in chosen], rel=2e-6, abs=1e-37)


# --- every argument, sizes, dtypes ------------------------------------------------------------------------------------


def test_a2_every_argument_of_route_matters(device: str) -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 16, generator=g).to(device)
    bias = torch.randn(16, generator=g).to(device)
    base = {"top_k": 3, "method": "sigmoid_topk", "correction_bias": bias, "groups": 4, "topk_groups": 2}
    changes: list[dict[str, Any]] = [
        {"top_k": 4}, {"correction_bias": None}, {"correction_bias": -bias}, {"groups": 8}, {"topk_groups": 3},
        {"renormalize": False}, {"scale": 2.0}, {"method": "softmax_topk"},
    ]  # fmt: skip
    want = route(logits, **base)
    for change in changes:
        got = route(logits, **{**base, **change})
        assert got[1].shape != want[1].shape or not torch.equal(got[1], want[1]), change
    tokens, table = torch.arange(6, device=device), torch.arange(12, device=device).view(6, 2)
    hashed = route(logits, 2, "sqrtsoftplus_topk", input_ids=tokens, hash_table=table)
    assert not torch.equal(
        hashed[0], route(logits, 2, "sqrtsoftplus_topk", input_ids=tokens.flip(0), hash_table=table)[0]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_other_dtypes_are_rounded_to_float32_first(device: str, method: str, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 12, dtype=torch.float64).to(dtype).to(device)
    for got, want in zip(
        route(logits, 4, **options_of(method)), route(logits.float(), 4, **options_of(method)), strict=True
    ):
        assert torch.equal(got, want)
    if METHODS[method].bias:
        bias = torch.randn(12, dtype=torch.float64).to(dtype).to(device)
        got = route(logits, 4, correction_bias=bias, **options_of(method))
        want = route(logits, 4, correction_bias=bias.float(), **options_of(method))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("method", METHODS)
def test_strided_and_empty(device: str, method: str) -> None:
    logits = torch.randn(6, 5, device=device)
    want, got = (route(x, 2, **options_of(method)) for x in (logits, logits.t().contiguous().t()))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert got[0].is_contiguous() and got[1].is_contiguous()
    ids, weights = route(logits[:0], 2, **options_of(method))
    assert ids.shape == weights.shape == (0, 2)


def rows(count: int, experts: int, seed: int) -> Tensor:
    """Random logits of three sizes, with ties and special values in the first rows."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, experts, generator=g) * torch.tensor([1.0, 10.0, 100.0]).repeat(count)[:count, None]
    specials = [[NAN], [-INF], [INF], [0.0, -0.0], [-200.0], [1.0]]
    for i, values in enumerate(specials[:count]):
        logits[i, : (experts + 1) // 2] = torch.tensor(values).repeat(experts)[: (experts + 1) // 2]
    return logits


@pytest.mark.parametrize("experts", [1, 7, 64, 384, 4096])
@pytest.mark.parametrize("method", METHODS)
def test_the_compiled_kernel_has_the_bits_of_plain_torch(method: str, experts: int) -> None:
    """The bits of plain torch are those of every device, since each of its steps is rounded as IEEE 754 says."""
    known = METHODS[method]
    logits, bias = rows(6 if experts == 4096 else 33, experts, experts), torch.randn(experts)
    for placed in (None, bias) if known.bias else (None,):
        for groups in (1, 8) if known.groups and experts % 8 == 0 else (1,):
            for renormalize in (True, False) if known.renormalize is None else (known.renormalize,):
                options = {"groups": groups, "topk_groups": (groups + 1) // 2, "renormalize": renormalize, "scale": 1.7}
                top_k = min(32, experts // groups * options["topk_groups"])
                got = route(logits, top_k, method, correction_bias=placed, **options)
                want = routing.route(logits, placed, None, top_k, score=known.score, **options)
                assert torch.equal(got[0], want[0])
                assert torch.equal(got[1].view(torch.int32) & 0x7FFFFFFF, want[1].view(torch.int32) & 0x7FFFFFFF)
