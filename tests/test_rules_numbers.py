"""Rules N and A of docs/rules.md that no other suite shows by itself: the numbers, written by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import mxfp4_ops
import pytest
import torch
from mxfp4_ops import ACTIVATIONS, ExpertWeights, prepare
from mxfp4_ops import format as fmt
from mxfp4_ops.backends import Backend
from problems import TINY, inputs, moe_call, weights
from torch import Tensor

OPS = torch.ops.mxfp4
Runnable = tuple[str, Backend]
DEQUANT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "op": lambda b, s: OPS.dequant(b, s, dtype=torch.float32),
    "definition": lambda b, s: fmt.dequant(b, s, torch.float32),
}
QUANT: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "op": OPS.quant,
    "definition": lambda x: fmt.quant(x, "even"),
}


def filled(byte: int, *shape: int, device: str = "cpu") -> Tensor:
    return torch.full(shape, byte, dtype=torch.uint8, device=device)


def one_path(device: str, *, gated: bool, experts: int = 1, biases: bool = False) -> ExpertWeights:
    """Column 0 of the result is act(x0, x1), or act(x0) without a gate; all scales 1. With ``biases``, the gate's is 2,
    the up row's 3 and the result's 1."""
    w13 = filled(0, experts, 64 if gated else 32, 16, device=device)
    w13[:, 0, 0] = 0x02  # 1.0 at column 0
    if gated:
        w13[:, 32, 0] = 0x20  # 1.0 at column 1
    w2 = filled(0, experts, 32, 16, device=device)
    w2[:, 0, 0] = 0x02
    b13 = torch.zeros(experts, w13.shape[1], device=device)
    b13[:, 0], b13[:, 32:33] = 2.0, 3.0
    b2 = torch.ones(experts, 32, device=device)
    scales = (filled(127, experts, w13.shape[1], 1, device=device), filled(127, experts, 32, 1, device=device))
    return ExpertWeights(w13, scales[0], b13 if biases else None, w2, scales[1], b2 if biases else None)


@pytest.mark.parametrize("which", DEQUANT)
def test_n1_the_even_element_lies_in_the_low_nibble(which: str) -> None:
    blocks = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0x80] * 8], dtype=torch.uint8)
    out = DEQUANT[which](blocks, filled(127, 1)).tolist()
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert out[:16] == [*magnitudes, *(-m for m in magnitudes)] and out[16:] == [0.0] * 16


@pytest.mark.parametrize("which", DEQUANT)
def test_n2_scale_bytes_at_both_ends(which: str) -> None:
    """One in code 2: byte 0 is 2^-127 and not zero, 254 is 2^127 and not infinite, 255 makes NaN of a zero, too."""
    scales = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)
    out = DEQUANT[which](torch.tensor([[0x02] + [0] * 15] * 5, dtype=torch.uint8), scales[:, None])
    assert out[:4, 0].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and not out[:4, 1:].any()
    assert torch.isnan(out[4]).all()


def test_n5_one_default_rule_everywhere() -> None:
    defaults = {
        name: {a.name: a.default_value for a in getattr(OPS, name).default._schema.arguments}
        for name in ("quant", "qdq", "qdq_mxfp4")
    }
    assert defaults["quant"]["scale_rule"] == defaults["qdq"]["scale_rule"] == "even"
    assert defaults["qdq_mxfp4"]["scale_calculation_mode"] == "even"
    for function in (mxfp4_ops.quant_mxfp4, mxfp4_ops.qdq_mxfp4):
        assert inspect.signature(function).parameters["scale_rule"].default == "even"


@pytest.mark.parametrize("which", QUANT)
def test_n7_a_zero_block_leaves_its_neighbours(which: str) -> None:
    """1.5 is 6 * 2^-2: code 7 at byte 125. -0 keeps its sign in code 8."""
    x = torch.cat([torch.zeros(32), torch.full((32,), 1.5), -torch.zeros(32)])
    blocks, scales = QUANT[which](x)
    assert scales.tolist() == [0, 125, 0]
    assert blocks.tolist() == [0x00] * 16 + [0x77] * 16 + [0x88] * 16


BY_HAND = {  # at g = 1 and u = 1, ten digits
    "silu": 0.7310585786,
    "swigluoai": 2 * 0.8457957659,  # (u + 1) sigmoid(1.702)
    "swiglustep": 0.7310585786,
    "situ": 4 * 0.2449186624 * 0.7310585786 * 25 * 0.0399786803,  # tanh(1/4), sigmoid(1), tanh(1/25)
    "gelu": 0.8413447461,
    "gelu_tanh": 0.8411919906,
    "relu2_no_mul": 1.0,
    "silu_no_mul": 0.7310585786,
    "gelu_no_mul": 0.8413447461,
    "gelu_tanh_no_mul": 0.8411919906,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a1_every_activation_at_one(runnable: Runnable, name: str) -> None:
    device, backend = runnable
    packed = prepare(one_path(device, gated=ACTIVATIONS[name].gated), activation=name, prefer=backend.name)
    x = torch.zeros(1, 32, device=device)
    x[0, :2] = 1.0
    out = packed(x, torch.zeros(1, 1, dtype=torch.int32, device=device), torch.ones(1, 1, device=device))
    assert out[0, 0].item() == pytest.approx(BY_HAND[name], rel=2e-6) and not out[0, 1:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a3_biases_stand_where_they_belong(runnable: Runnable, dtype: torch.dtype) -> None:
    """x is zero: silu(2) * 3 + 1 = 6.284782468, times the routing weight, once for each slot."""
    device, backend = runnable
    packed = prepare(one_path(device, gated=True, experts=2, biases=True), prefer=backend.name)
    ids = torch.tensor([[0, 1], [1, 1], [1, -1]], dtype=torch.int32, device=device)
    wts = torch.tensor([[0.5, 0.25], [0.5, 0.5], [2.0, 9.0]], device=device)
    out = packed(torch.zeros(3, 32, dtype=dtype, device=device), ids, wts)
    one = 6.284782468
    wanted = [one * 0.75, one, one * 2]
    assert out[:, 0].tolist() == pytest.approx(wanted, rel=2e-6 if dtype is torch.float32 else 6e-3)
    assert out[:, 5].tolist() == [0.75, 1.0, 2.0]  # the second bias alone


def test_a4_no_op_changes_or_aliases_an_input(runnable: Runnable) -> None:
    device, backend = runnable
    x = torch.randn(5, 96, device=device)
    blocks, scales = OPS.quant(x)
    six = tuple(weights(TINY, device=device).tensors().values())
    packed = prepare(weights(TINY, device=device), prefer=backend.name)
    mine = torch.arange(7, dtype=torch.int32, device=device)
    layout = {"layout": backend.layout.tag}
    ids = inputs(TINY, device=device)[1]
    calls = [
        (OPS.quant, (x,), {}), (OPS.qdq, (x,), {}), (OPS.dequant, (blocks, scales), {"dtype": torch.float32}),
        (OPS.dequant, (blocks, scales), {"dtype": torch.float16}), (OPS.localise, (ids, mine), {}),
        (OPS.route, (x, None, None, None, 3), {}), (OPS.prepare_moe, six, layout),
        (OPS.unprepare_moe, (packed.tensors(),), {**layout, "hidden": 96, "intermediate": 160}),
        (OPS.moe, *moe_call(packed, *inputs(TINY, device=device))),
        (OPS.moe, *moe_call(packed, *inputs(TINY, device=device), weight_on_input=True)),
    ]  # fmt: skip
    for op, args, kwargs in calls:
        given = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor) and t.numel()]
        before = [t.clone() for t in given]
        made = torch.utils._pytree.tree_leaves(op(*args, **kwargs))
        assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True)), op
        storages = [t.untyped_storage().data_ptr() for t in (*given, *made) if t.numel()]
        assert len(set(storages[len(given) :]) - set(storages[: len(given)])) == len(storages) - len(given), op
