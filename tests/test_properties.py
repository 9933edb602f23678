"""What must hold for any numbers and sizes. Examples are the same in every run: nothing here is random."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from conftest import RUNNABLE
from hypothesis import given, settings
from hypothesis import strategies as st
from mxfp4_ops import Activation, ExpertWeights, MXFP4Experts, PackedExperts, prepare, repack_expert, unprepare
from mxfp4_ops.backends import Backend
from mxfp4_ops.checkpoint import load_packed, save_packed
from mxfp4_ops.layout import SLOTS
from problems import Problem, inputs, weights
from torch import Tensor

OPS = torch.ops.mxfp4
few = settings(max_examples=25, derandomize=True, deadline=None, database=None)
many = settings(few, max_examples=100)
# Not the fixtures: hypothesis wants a test to be one function over all of its examples.
on_every_backend = pytest.mark.parametrize(
    ("device", "backend"), RUNNABLE, ids=[f"{backend.name}-{device}" for device, backend in RUNNABLE]
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of tiny calls: waking a second thread for each takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


every_rule = pytest.mark.parametrize("rule", exact.RULES)

# ------------------------------------------------------------------------------------------------- the number format


@st.composite
def blocks_of_floats(draw: st.DrawFn) -> Tensor:
    """x [n, 32], finite, of a dtype that is drawn: any bit patterns, or multiples of an eighth, which meet ties."""
    dtype = draw(st.sampled_from(list(exact.FORMATS)))
    rows = draw(st.integers(1, 3))
    if draw(st.booleans()):
        size = torch.finfo(dtype).bits // 8
        data = draw(st.binary(min_size=32 * rows * size, max_size=32 * rows * size))
        x = torch.frombuffer(bytearray(data), dtype=dtype).view(rows, 32)
        return torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    eighths = draw(st.lists(st.integers(-64, 64), min_size=32 * rows, max_size=32 * rows))
    return (torch.tensor(eighths, dtype=torch.float32) / 8).to(dtype).view(rows, 32)


def bits(x: Tensor) -> Tensor:
    return x.view(exact.INTEGERS[x.dtype])


@every_rule
@many
@given(x=blocks_of_floats())
def test_rounding_twice(rule: str, x: Tensor) -> None:
    """Values are idempotent by every rule unless the first pass overflowed to Inf; bytes by even and floor. The scale
    of ceil (rceil) is one lower where the largest code is 2 (3) in the first pass, and the same else."""
    blocks, scales = OPS.quant(x, scale_rule=rule)
    once = OPS.qdq(x, scale_rule=rule)
    twice = OPS.qdq(once, scale_rule=rule)
    finite = torch.isfinite(once).all(-1)
    assert torch.equal(bits(twice)[finite], bits(once)[finite]) and torch.isnan(twice[~finite]).all()
    again = OPS.quant(once, scale_rule=rule)
    largest = torch.stack((blocks & 7, blocks >> 4 & 7)).amax((0, -1))
    code = {"ceil": 4, "rceil": 5}.get(rule, -1)
    lower = (scales[:, 0].int() - (largest == code).int()).clamp_min(0)
    assert torch.equal(again[1][finite, 0].int(), lower[finite])
    same = finite & (lower == scales[:, 0])
    assert torch.equal(again[0][same], blocks[same])


@many
@given(x=blocks_of_floats())
def test_values_that_mxfp4_holds_come_back(x: Tensor) -> None:
    """By every rule but ceil, which loses 0.5 and 1.5 beside a 6 (docs/format.md)."""
    held = OPS.qdq(x.float(), scale_rule="floor")
    held = torch.where(torch.isfinite(held).all(-1, keepdim=True), held, 0)
    for rule in ("even", "floor", "rceil"):
        assert torch.equal(bits(OPS.qdq(held, scale_rule=rule)), bits(held)), rule


@every_rule
@many
@given(x=st.lists(st.integers(-4096, 4096), min_size=32, max_size=32), n=st.integers(-100, 100))
def test_a_shift_by_a_power_of_two_moves_the_scale_alone(rule: str, x: list[int], n: int) -> None:
    block = torch.tensor(x, dtype=torch.float32)
    blocks, scales = OPS.quant(block, scale_rule=rule)
    shifted = OPS.quant(torch.ldexp(block, torch.tensor(n)), scale_rule=rule)
    assert torch.equal(shifted[0], blocks)
    assert int(shifted[1]) == (int(scales) + n if any(x) else 0)
    there = OPS.dequant(*shifted, dtype=torch.float32)
    assert torch.equal(
        bits(there), bits(torch.ldexp(OPS.dequant(blocks, scales, dtype=torch.float32), torch.tensor(n)))
    )


@every_rule
@few
@given(x=blocks_of_floats())
def test_the_error_is_half_a_step_or_saturation(rule: str, x: Tensor) -> None:
    blocks, scales = OPS.quant(x, scale_rule=rule)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    limit = {"even": 7, "floor": 8, "ceil": 4, "rceil": 6}[rule]
    for row, row_codes, byte in zip(x.double().tolist(), codes.tolist(), scales[:, 0].tolist(), strict=True):
        for value, code in zip(row, row_codes, strict=True):
            scaled = Fraction(value) / Fraction(2) ** (byte - 127)
            error, size = abs(exact.value(code, 127) - scaled), abs(scaled)
            half_step = Fraction(1, 4) if size <= 2 else Fraction(1, 2) if size <= 4 else 1
            assert size <= limit and (error <= half_step or (size > 6 and code & 7 == 7)), (value, code, byte)


# ------------------------------------------------------------------------------------------------------------ the layer

sizes = st.sampled_from([32, 64, 96])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, int]:
    """A small layer and a seed for its numbers."""
    problem = Problem(
        "drawn",
        experts=draw(st.integers(1, 4)),
        hidden=draw(sizes),
        intermediate=draw(sizes),
        top_k=draw(st.integers(1, 3)),
        tokens=draw(st.integers(1, 6)),
        activation=draw(st.sampled_from(["silu", "swigluoai", "gelu", "relu2_no_mul"])),
        bias=draw(st.booleans()),
    )
    return problem, draw(st.integers(0, 2**16))


def choose(experts: ExpertWeights, rows: Tensor) -> ExpertWeights:
    """The experts of these rows, in this order."""
    return ExpertWeights(**{n: None if t is None else t[rows.to(t.device)] for n, t in experts.tensors().items()})


class Layer:
    """Packed experts of a drawn problem, and arguments for a call: x float32, since that shows the smallest error."""

    def __init__(self, problem: Problem, seed: int, device: str, backend: Backend) -> None:
        self.problem, self.backend = problem, backend
        self.experts = weights(problem, seed, device=device)
        self.x, self.ids, self.routing = inputs(problem, torch.float32, seed, device=device)
        self.packed = self.pack(self.experts)

    def pack(self, experts: ExpertWeights) -> PackedExperts:
        return prepare(experts, activation=Activation(self.problem.activation), prefer=self.backend.name)

    def __call__(self, **changes: Any) -> Tensor:
        return self.packed(self.x, self.ids, self.routing, **changes)

    def order(self, seed: int) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return torch.randperm(self.problem.experts, generator=g).to(self.x.device, torch.int32)

    def assert_near(self, found: Tensor, wanted: Tensor) -> None:
        """Both are within the backend's tolerance of the right answer, so their distance is at most twice that."""
        bound = 2 * self.backend.tolerance.of(found.dtype)
        assert (found - wanted).double().norm() <= bound * wanted.double().norm() + 1e-30


@on_every_backend
@few
@given(drawn=problems(), seed=st.integers(0, 99))
def test_the_order_of_experts_changes_no_bit(
    device: str, backend: Backend, drawn: tuple[Problem, int], seed: int
) -> None:
    """Experts are permuted with their ids, or named by expert_ids: slots are still added in the order of ids."""
    layer = Layer(*drawn, device, backend)
    wanted, order = layer(), layer.order(seed)
    permuted = layer.pack(choose(layer.experts, order))
    assert torch.equal(permuted(layer.x, layer.ids, layer.routing, expert_ids=order), wanted)
    place = order.argsort().to(torch.int32)
    local = torch.where(layer.ids >= 0, place[layer.ids.clamp_min(0)], layer.ids)
    assert torch.equal(permuted(layer.x, local, layer.routing), wanted)
    identity = torch.arange(drawn[0].experts, dtype=torch.int32, device=device)
    assert torch.equal(layer(expert_ids=identity), wanted)


@on_every_backend
@few
@given(drawn=problems(), cut=st.integers(0, 6))
def test_splitting_tokens_is_concatenating(device: str, backend: Backend, drawn: tuple[Problem, int], cut: int) -> None:
    """Bit for bit with batch_invariant (rule N8), and without it within tolerance."""
    layer = Layer(*drawn, device, backend)
    for invariant in (True, False):
        whole = layer(batch_invariant=invariant)
        parts = [
            layer.packed(layer.x[part], layer.ids[part], layer.routing[part], batch_invariant=invariant)
            for part in (slice(0, cut), slice(cut, None))
        ]
        if invariant:
            assert torch.equal(torch.cat(parts), whole)
        else:
            layer.assert_near(torch.cat(parts), whole)


@on_every_backend
@few
@given(drawn=problems(), owner=st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_shards_of_experts_sum_to_the_whole(
    device: str, backend: Backend, drawn: tuple[Problem, int], owner: list[int]
) -> None:
    layer = Layer(*drawn, device, backend)
    total = torch.zeros_like(layer.x)
    for rank in range(3):
        rows = [e for e in range(drawn[0].experts) if owner[e] == rank]
        if rows:
            ids = torch.tensor(rows, dtype=torch.int32, device=device)
            shard = layer.pack(choose(layer.experts, ids))
            total += shard(layer.x, layer.ids, layer.routing, expert_ids=ids)
    layer.assert_near(total, layer())


def widen(tensor: Tensor | None, dim: int, halves: int, more: int, fill: int) -> Tensor | None:
    """Add ``more`` entries of ``fill`` to each half of a dimension."""
    if tensor is None:
        return None
    extra = list(tensor.shape)
    extra[dim] = more
    parts = tensor.chunk(halves, dim)
    return torch.cat([p for part in parts for p in (part, tensor.new_full(extra, fill))], dim)


@on_every_backend
@few
@given(drawn=problems(), more=sizes, scale=st.integers(0, 254))
def test_padding_changes_nothing(
    device: str, backend: Backend, drawn: tuple[Problem, int], more: int, scale: int
) -> None:
    """Zero codes at any scale byte, more of intermediate and of hidden: the result is the same and zeros beside it."""
    layer = Layer(*drawn, device, backend)
    halves, w = 2 if layer.problem.gated else 1, layer.experts
    deep = ExpertWeights(
        widen(w.w13, 1, halves, more, 0),
        widen(w.w13_scale, 1, halves, more, scale),
        widen(w.w13_bias, 1, halves, more, 0),
        widen(w.w2, 2, 1, more // 2, 0),
        widen(w.w2_scale, 2, 1, more // 32, scale),
        w.w2_bias,
    )
    layer.assert_near(layer.pack(deep)(layer.x, layer.ids, layer.routing), layer())
    wide = ExpertWeights(
        widen(w.w13, 2, 1, more // 2, 0),
        widen(w.w13_scale, 2, 1, more // 32, scale),
        w.w13_bias,
        widen(w.w2, 1, 1, more, 0),
        widen(w.w2_scale, 1, 1, more, scale),
        widen(w.w2_bias, 1, 1, more, 0),
    )
    out = layer.pack(wide)(
        torch.cat((layer.x, torch.ones(len(layer.x), more, device=device)), 1), layer.ids, layer.routing
    )
    layer.assert_near(out[:, : drawn[0].hidden], layer())
    assert not out[:, drawn[0].hidden :].any()


@on_every_backend
@few
@given(drawn=problems(), invariant=st.booleans())
def test_the_dtype_of_ids_and_a_second_call_change_no_bit(
    device: str, backend: Backend, drawn: tuple[Problem, int], invariant: bool
) -> None:
    layer = Layer(*drawn, device, backend)
    wanted = layer(batch_invariant=invariant)
    assert torch.equal(layer(batch_invariant=invariant), wanted)
    layer.ids = layer.ids.long()
    assert torch.equal(layer(batch_invariant=invariant), wanted)


# ---------------------------------------------------------------------------------------------------------------- bytes


def assert_equal(found: ExpertWeights | PackedExperts, wanted: ExpertWeights | PackedExperts) -> None:
    a, b = (list(t.tensors().values()) if isinstance(t, ExpertWeights) else t.tensors() for t in (found, wanted))
    for left, right in zip(a, b, strict=True):
        assert (left is None and right is None) or (left.dtype is right.dtype and torch.equal(left, right))


@on_every_backend
@few
@given(drawn=problems(), interleaved=st.booleans())
def test_checkpoint_bytes_come_back(
    device: str, backend: Backend, drawn: tuple[Problem, int], interleaved: bool
) -> None:
    problem, seed = drawn
    interleaved = interleaved and problem.gated
    experts = weights(problem, seed, 0, 255, device)
    act = Activation(problem.activation)
    packed = prepare(experts, activation=act, prefer=backend.name, interleaved=interleaved)
    assert_equal(unprepare(packed, interleaved=interleaved), experts)


@on_every_backend
@few
@given(drawn=problems())
def test_saved_experts_are_the_same_experts(
    device: str, backend: Backend, drawn: tuple[Problem, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    layer = Layer(*drawn, device, backend)
    path: Path = tmp_path_factory.getbasetemp() / "property.safetensors"
    save_packed(layer.packed, path)
    loaded = load_packed(path, device)
    assert_equal(loaded, layer.packed)
    tensors = {name: getattr(layer.packed, name) for name in SLOTS}
    assert replace(loaded, **tensors) == layer.packed  # the tag, the sizes and the activation
    stream = io.BytesIO()
    torch.save(MXFP4Experts(layer.packed).state_dict(), stream)
    stream.seek(0)
    other = MXFP4Experts(layer.pack(weights(layer.problem, drawn[1] + 1, device=device)))
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert_equal(other.packed, layer.packed)


@on_every_backend
@few
@given(drawn=problems(), expert=st.integers(0, 3))
def test_repacking_an_expert_is_packing_it(
    device: str, backend: Backend, drawn: tuple[Problem, int], expert: int
) -> None:
    layer = Layer(*drawn, device, backend)
    expert %= drawn[0].experts
    new = weights(drawn[0], drawn[1] + 1, device=device)
    mixed = {n: None if t is None else t.clone() for n, t in layer.experts.tensors().items()}
    for name, tensor in new.tensors().items():
        if tensor is not None:
            mixed[name][expert] = tensor[expert]
    wanted = layer.pack(ExpertWeights(**mixed))
    one = ExpertWeights(**{n: None if t is None else t[expert] for n, t in new.tensors().items()})
    repack_expert(layer.packed, expert, one)
    assert_equal(layer.packed, wanted)
