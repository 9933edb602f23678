"""Rules R, E and S of docs/rules.md that no other suite shows by itself: ids, weights of slots, sizes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import mxfp4_ops
import pytest
import torch
from mxfp4_ops import Activation, ExpertWeights, PackedExperts, pack_topk, prepare, quant_x, unpack_topk
from mxfp4_ops.backends import Backend
from mxfp4_ops.experts import pad_expert
from mxfp4_ops.routing import METHODS
from mxfp4_ops.x_formats import FORMS
from problems import TINY, Problem, answer, errors, inputs, moe_call, weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OPS = torch.ops.mxfp4
Runnable = tuple[str, Backend]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack(runnable: Runnable, problem: Problem) -> PackedExperts:
    device, backend = runnable
    return prepare(weights(problem, device=device), activation=problem.activation, prefer=backend.name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_r1_minus_one_contributes_nothing(runnable: Runnable, bad: float, dtype: torch.dtype) -> None:
    """Whatever its weight, and also where expert_ids makes it -1; a row of such slots alone is exactly zero."""
    device, packed = runnable[0], pack(runnable, TINY)
    x = inputs(TINY.with_(tokens=3), dtype, device=device)[0]
    ids = torch.tensor([[3, -1], [-1, 6], [-1, -1]], device=device)
    wts = torch.tensor([[0.5, bad], [bad, 2.0], [bad, bad]], device=device)
    alone = torch.cat([packed(x[:1], ids[:1, :1], wts[:1, :1]), packed(x[1:2], ids[1:2, 1:], wts[1:2, 1:])])
    for options in ({}, {"batch_invariant": True}, {"weight_on_input": True}):
        out = packed(x, ids, wts, **options)
        assert torch.isfinite(out).all() and not out[2].any()
        if not options:
            torch.testing.assert_close(out[:2], alone)
    foreign = torch.where(ids < 0, 99, ids)
    mine = torch.arange(7, dtype=torch.int32, device=device)
    assert torch.equal(packed(x, foreign, wts, expert_ids=mine), packed(x, ids, wts))
    assert torch.equal(packed(x, ids, wts, expert_ids=mine), packed(x, ids, wts))


def test_r1_a_skipped_slot_finds_no_negative_expert_number() -> None:
    """A -1 in expert_ids would have been found by every skipped slot."""
    for call in (
        lambda mine: OPS.localise(torch.tensor([[-1, 0]]), mine),
        lambda mine: pack(("cpu", mxfp4_ops.BACKENDS[-1]), TINY)(*inputs(TINY), expert_ids=mine),
    ):
        with pytest.raises(ValueError, match="expert_ids must be expert numbers from 0 on, got -1"):
            call(torch.tensor([4, 0, -1, 1, 2, 3, 5], dtype=torch.int32))


def test_r2_both_widths_of_ids_give_the_same_bits(runnable: Runnable) -> None:
    device, packed = runnable[0], pack(runnable, TINY)
    x, ids, wts = inputs(TINY, device=device)
    wide, kept = ids.long(), ids.clone()
    assert torch.equal(packed(x, ids, wts), packed(x, wide, wts))
    assert torch.equal(ids, kept) and torch.equal(wide, kept.long())
    for wrong in (torch.int16, torch.uint8, torch.float32, torch.bool):
        name = str(wrong).removeprefix("torch.")
        with pytest.raises(TypeError, match=f"topk_ids must be int32 or int64, got {name}"):
            packed(x, ids.to(wrong), wts)


def test_r4_ranks_and_process_groups_are_not_looked_at(runnable: Runnable, monkeypatch: pytest.MonkeyPatch) -> None:
    device, packed = runnable[0], pack(runnable, TINY)
    args, wanted = inputs(TINY, device=device), pack(runnable, TINY)(*inputs(TINY, device=device))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("process-group state was asked for")

    for name in ("is_initialized", "get_rank", "get_world_size"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "EP_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(os, "getenv", refuse)
    assert torch.equal(packed(*args), wanted)
    assert torch.equal(packed(*args, expert_ids=torch.arange(7, dtype=torch.int32, device=device)), wanted)
    for path in Path(mxfp4_ops.__file__).parent.rglob("*.py"):
        assert "torch.distributed" not in path.read_text(), path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_r5_weights_count_as_given(runnable: Runnable, dtype: torch.dtype) -> None:
    """The same expert twice counts twice, order is free, and a sum of weights is not brought to one."""
    device, packed = runnable[0], pack(runnable, TINY)
    x = inputs(TINY.with_(tokens=1), torch.float32, device=device)[0]

    def run(ids: list[int], wts: list[float]) -> Tensor:
        return packed(x, torch.tensor([ids], device=device), torch.tensor([wts], dtype=dtype, device=device))

    once, other = run([4], [1.0]), run([2], [1.0])
    torch.testing.assert_close(run([4, 4], [1.0, 1.0]), 2 * once, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run([4, 2], [0.25, 0.125]), once / 4 + other / 8, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run([4, 2], [3.0, -1.0]), run([2, 4], [-1.0, 3.0]), rtol=1e-5, atol=1e-4)
    assert not run([4, 2], [0.0, 0.0]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_e1_no_tokens(runnable: Runnable, dtype: torch.dtype) -> None:
    device, packed = runnable[0], pack(runnable, TINY)
    x = torch.empty(0, 96, dtype=dtype, device=device)
    ids, wts = torch.empty(0, 4, dtype=torch.int32, device=device), torch.empty(0, 4, device=device)
    mine = torch.arange(7, dtype=torch.int32, device=device)
    for options in ({}, {"batch_invariant": True}, {"weight_on_input": True}, {"expert_ids": mine}):
        out = packed(x, ids, wts, **options)
        assert out.shape == (0, 96) and out.dtype is dtype and out.device == x.device and out is not x
    blocks, scales = OPS.quant(x)
    assert blocks.shape == (0, 48) and scales.shape == (0, 3)
    assert OPS.dequant(blocks, scales, dtype=dtype).shape == OPS.qdq(x).shape == (0, 96)
    assert [t.shape for t in OPS.route(x.float(), None, None, None, 4)] == [(0, 4), (0, 4)]
    assert OPS.localise(ids, mine).shape == (0, 4)


def test_e1_no_tokens_in_the_newer_ops(runnable: Runnable) -> None:
    """Out variants, unfinalized rows and their sum, gradients, every form of x and every method of routing."""
    device, packed = runnable[0], pack(runnable, TINY)
    x, ids, wts = (t[:0] for t in inputs(TINY, device=device))
    args, options = moe_call(packed, x, ids, wts)
    assert packed(x, ids, wts, out=(out := torch.empty_like(x))) is out and out.shape == (0, 96)
    rows, row_of_slot = OPS.moe_unfinalized(*args, **options)
    assert (rows.shape, row_of_slot.shape, row_of_slot.dtype) == ((0, 96), (0, 4), torch.int32)
    assert OPS.finalize(rows, row_of_slot, wts).shape == (0, 96)
    found = OPS.moe_backward(x, *args, output_mask=[True] * 4, **options)
    assert found[0].shape == (0, 96) and found[1].shape == (0, 4) and not any(bias.any() for bias in found[2:])
    plain = prepare(weights(TINY, device=device), prefer="reference")
    for name, form in FORMS.items():
        assert plain(x, ids, wts, x_format=name).shape == (0, 96)
        if form.x_dtypes:
            data, scale = quant_x(x, name)
            out = plain(data, ids, wts, x_scale=scale, x_format=name)
            assert out.shape == (0, 96) and out.dtype is torch.bfloat16
    for name, method in METHODS.items():
        renormalize = method.renormalize is not False
        routed = OPS.route(x, None, None, None, 4, method=name, renormalize=renormalize)
        assert [t.shape for t in routed] == [(0, 4), (0, 4)]
    assert all(t.shape == (0, 4) for t in unpack_topk(pack_topk(ids, wts)))


@pytest.mark.parametrize("tokens", [1, 17, 200])
def test_e2_all_tokens_on_one_expert_or_on_none(runnable: Runnable, tokens: int) -> None:
    device, backend = runnable
    problem = TINY.with_(tokens=tokens, top_k=2)
    experts, (x, ids, wts) = weights(problem, device=device), inputs(problem, torch.float32, device=device)
    packed = prepare(experts, prefer=backend.name)
    alone = torch.full_like(ids, 5)
    assert errors(packed(x, alone, wts), answer(experts, x, alone, wts, Activation()))[0] < 1e-5
    assert not packed(x, torch.full_like(ids, -1), wts).any()
    assert not packed(x, ids, wts, expert_ids=torch.arange(50, 57, dtype=torch.int32, device=device)).any()


def test_e2_a_shard_of_no_experts(runnable: Runnable) -> None:
    device, backend = runnable
    none = [None if t is None else t[:0] for t in weights(TINY, device=device).tensors().values()]
    held = OPS.prepare_moe(*none, layout=backend.layout.tag)
    x, ids, wts = inputs(TINY, device=device)
    nobody = torch.empty(0, dtype=torch.int32, device=device)
    sizes = {"layout": backend.layout.tag, "hidden": 96, "intermediate": 160}
    out = OPS.moe(x, ids, wts, *held, [], nobody, **sizes)
    assert out.shape == (5, 96) and not out.any()


SIZES = [(1824, 160), (2688, 384), (2880, 704), (64, 736), (64, 672), (96, 928), (32, 32), (2880, 32)]


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_s1_any_multiple_of_32(runnable: Runnable, hidden: int, intermediate: int) -> None:
    device, backend = runnable
    problem = Problem("size", 2, hidden, intermediate, 2, 3)
    experts, args = weights(problem, device=device), inputs(problem, torch.float32, device=device)
    out = prepare(experts, prefer=backend.name)(*args)
    assert errors(out, answer(experts, *args, Activation()))[0] < backend.tolerance.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_s2_the_result_has_the_logical_size(runnable: Runnable, dtype: torch.dtype) -> None:
    """96 is padded to 128 inside; neither the shape, nor the strides, nor the storage shows it."""
    device, packed = runnable[0], pack(runnable, TINY)
    out = packed(*inputs(TINY, dtype, device=device))
    assert out.shape == (5, 96) and out.stride() == (96, 1) and out.storage_offset() == 0
    assert out.untyped_storage().nbytes() == 5 * 96 * dtype.itemsize


def test_s3_padding_that_is_not_needed_copies_nothing() -> None:
    for backend in mxfp4_ops.BACKENDS:
        expert = {n: t[0] for n, t in weights(Problem("fits", 1, 128, 192, 1, 1)).tensors().items() if t is not None}
        assert pad_expert(expert, backend.layout, gated=True) is expert


def test_s4_uneven_shards_of_the_intermediate_sum_to_the_whole(runnable: Runnable) -> None:
    device, backend = runnable
    experts, args = weights(TINY, device=device), inputs(TINY, torch.float32, device=device)
    whole = prepare(experts, prefer=backend.name)(*args)
    total = torch.zeros_like(whole)
    for first, last in ((0, 32), (32, 128), (128, 160)):  # 1, 3 and 1 blocks
        rows = [*range(first, last), *range(160 + first, 160 + last)]
        shard = ExpertWeights(
            experts.w13[:, rows],
            experts.w13_scale[:, rows],
            experts.w13_bias[:, rows],
            experts.w2[:, :, first // 2 : last // 2],
            experts.w2_scale[:, :, first // 32 : last // 32],
            experts.w2_bias if first == 0 else None,  # once, not on every rank
        )
        total += prepare(shard, prefer=backend.name)(*args)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-4)


class Seen(TorchDispatchMode):
    """Names of the ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w13": 24}, ("hidden", "48", "32")),
        ({"w2": 8}, ("intermediate", "16", "32")),
        ({"w13_scale": 2}, ("w13_scale", "[7, 320, 3]", "[7, 320, 2]")),
        ({"w2_scale": 6}, ("w2_scale", "[7, 96, 5]", "[7, 96, 6]")),
        ({"w13": 64}, ("w13_scale", "[7, 320, 4]", "[7, 320, 3]")),
    ],
)
def test_s5_sizes_that_do_not_fit_are_refused_before_any_work(change: dict[str, int], words: tuple[str, ...]) -> None:
    six = weights(TINY).tensors()
    for name, last in change.items():
        six[name] = torch.zeros(*six[name].shape[:-1], last, dtype=torch.uint8)
    with Seen() as seen, pytest.raises(ValueError) as caught:
        prepare(ExpertWeights(**six))
    assert all(word in str(caught.value) for word in words) and seen.names == []
