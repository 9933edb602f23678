"""``moe.out`` and ``dequant.out`` write where they are told; ``moe_unfinalized`` and ``finalize`` are ``moe`` in two
steps."""

from __future__ import annotations

import math

import pytest
import torch
from mxfp4_ops import dequant_mxfp4, finalize, format, mxfp4_moe, prepare
from mxfp4_ops.backends import Backend
from problems import TINY, Problem, errors, inputs, moe_call, weights
from test_ops import opcheck, strided
from torch import Tensor

OPS = torch.ops.mxfp4
Runnable = tuple[str, Backend]


def layer(runnable: Runnable, problem: Problem = TINY, dtype: torch.dtype = torch.bfloat16):  # type: ignore[no-untyped-def]
    device, backend = runnable
    packed = prepare(weights(problem, device=device), prefer=backend.name)
    return packed, inputs(problem, dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moe_out_has_the_bits_of_moe(runnable: Runnable, dtype: torch.dtype) -> None:
    packed, (x, ids, routing) = layer(runnable, dtype=dtype)
    wanted = packed(x, ids, routing)
    for out in (torch.full_like(x, math.nan), strided(torch.full_like(x, math.nan)), x.clone()):
        assert packed(x, ids, routing, out=out) is out
        assert torch.equal(out, wanted)
    assert packed(x, ids, routing, out=x) is x and torch.equal(x, wanted), "out may be x: it is written last"


def test_a2_moe_out_takes_every_option(runnable: Runnable) -> None:
    packed, (x, ids, routing) = layer(runnable)
    order = torch.arange(TINY.experts, dtype=torch.int32, device=x.device).flip(0)
    for options in ({"expert_ids": order}, {"weight_on_input": True}, {"batch_invariant": True}):
        out = torch.empty_like(x)
        packed(x, ids, routing, **options, out=out)
        assert torch.equal(out, packed(x, ids, routing, **options))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_c1_opcheck_out_and_unfinalized(runnable: Runnable, tokens: int) -> None:
    packed, args = layer(runnable, TINY.with_(tokens=tokens, hidden=64, intermediate=32))
    positional, options = moe_call(packed, *args)
    opcheck(OPS.moe.out, positional, {**options, "out": torch.empty_like(args[0])})
    opcheck(OPS.moe_unfinalized, positional, options)
    opcheck(OPS.moe_unfinalized, (*map(strided, args), *positional[3:]), options)
    turned = tuple(t.t().contiguous().t() for t in args)  # where() keeps such strides
    opcheck(OPS.moe_unfinalized, (*turned, *positional[3:]), options)
    assert all(t.is_contiguous() for t in OPS.moe_unfinalized(*turned, *positional[3:], **options))
    rows, row_of_slot = packed.unfinalized(*args)
    opcheck(OPS.finalize, (rows, row_of_slot, args[2]))
    opcheck(OPS.finalize, (strided(rows), strided(row_of_slot), strided(args[2])))


def test_out_in_a_compiled_graph(runnable: Runnable) -> None:
    packed, (x, ids, routing) = layer(runnable)
    positional, options = moe_call(packed, x, ids, routing)
    wanted = packed(x, ids, routing)

    def step(out: Tensor, *args: Tensor) -> Tensor:
        mxfp4_moe(*args, *positional[3:], **options, out=out)
        return out + 1

    out = torch.zeros_like(x)
    result = torch.compile(step, fullgraph=True, backend="aot_eager")(out, x, ids, routing)
    assert torch.equal(out, wanted) and torch.equal(result, wanted + 1)


def test_out_where_a_gradient_is_needed(runnable: Runnable) -> None:
    packed, (x, ids, routing) = layer(runnable)
    out = torch.empty_like(x)
    with pytest.raises(ValueError, match=r"mxfp4::moe.out: out must not be given where a gradient is needed"):
        packed(x, ids, routing.requires_grad_(), out=out)
    with torch.no_grad():
        assert torch.equal(packed(x, ids, routing, out=out), packed(x, ids, routing))


@pytest.mark.parametrize("dtype", format.FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (3, 5, 96), (2, 300000 // 32 * 32)])
def test_dequant_out(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, device=device)
    wanted = dequant_mxfp4(blocks, scales, dtype)
    for given in (None, dtype):
        out = torch.empty(shape, dtype=dtype, device=device)
        assert dequant_mxfp4(blocks, scales, given, out=out) is out
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    out = torch.empty(shape, dtype=dtype, device=device)
    OPS.dequant.out(strided(blocks), strided(scales), out=out)
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


def test_unfinalized_by_hand(runnable: Runnable) -> None:
    """Rows are what one expert makes of one token, with bias and without weight; -1 has no row."""
    packed, (x, ids, routing) = layer(runnable, dtype=torch.float32)
    rows, row_of_slot = packed.unfinalized(x, ids, routing)
    assert rows.dtype is x.dtype and rows.is_contiguous() and row_of_slot.dtype is torch.int32
    assert torch.equal(row_of_slot < 0, ids < 0) and row_of_slot.shape == ids.shape
    one = torch.ones(1, 1, device=x.device)
    for t, j in ((0, 0), (2, 3), (3, 1)):
        alone = packed(x[t : t + 1], ids[t : t + 1, j : j + 1], one)
        torch.testing.assert_close(rows[row_of_slot[t, j]], alone[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(packed.unfinalized(x, ids, routing * 3)[0], rows), "the routing weight comes later"
    on_input = packed.unfinalized(x, ids, routing, weight_on_input=True)[0]
    assert not torch.equal(on_input, rows)
    whole = finalize(on_input, row_of_slot, torch.ones_like(routing))
    assert errors(whole, packed(x, ids, routing, weight_on_input=True).cpu().double())[0] < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_finalize_makes_moe_of_it(runnable: Runnable, dtype: torch.dtype) -> None:
    """Up to the rounding of rows to x's dtype, which comes once more."""
    packed, (x, ids, routing) = layer(runnable, dtype=dtype)
    order = torch.tensor([9, 3, 0, 6, 2, 5, 1], dtype=torch.int32, device=x.device)
    for options in ({}, {"expert_ids": order}, {"batch_invariant": True}):
        whole = finalize(*packed.unfinalized(x, ids, routing, **options), routing)
        bound = {torch.bfloat16: 3e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]
        assert whole.dtype is dtype and errors(whole, packed(x, ids, routing, **options).cpu().double())[0] < bound


def test_finalize_by_hand(device: str) -> None:
    rows = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]], device=device)
    places = torch.tensor([[2, 0], [-1, 1], [-1, -1], [1, 1]], dtype=torch.int32, device=device)
    nan = math.nan
    routing = torch.tensor([[0.5, 2.0], [nan, 0.1], [nan, math.inf], [1.0, 1.0]], device=device)
    wanted = [[52.0, 104.0], [1.0, 2.0], [0.0, 0.0], [20.0, 40.0]]
    assert finalize(rows, places, routing).tolist() == wanted
    assert finalize(rows.bfloat16(), places, routing.bfloat16().double())[0].tolist() == [52.0, 104.0]
    assert finalize(rows[:0], torch.full_like(places, -1), routing).tolist() == [[0.0, 0.0]] * 4
    small = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16, device=device)  # 256 + 1 is 256 in bfloat16
    order = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device)
    assert finalize(small, order, torch.ones(1, 3, device=device)).tolist() == [[258.0]]


def test_unfinalized_refuses_ids_by_its_own_name() -> None:
    packed = prepare(weights(TINY))
    x, ids, routing = inputs(TINY)
    with pytest.raises(ValueError, match="mxfp4::moe_unfinalized: topk_ids must be below the number of experts E = 7"):
        packed.unfinalized(x, ids + 7, routing)
