"""Fifteen small cases from public bug reports, with the numbers written by hand (V1 to V15), and ten more (W1 to
W10)."""

from __future__ import annotations

import gc
import io
import math
import subprocess
import sys
import weakref

import pytest
import torch
from conftest import backends_for
from mxfp4_ops import Activation, ExpertWeights, PackedExperts, prepare, unprepare
from mxfp4_ops.backends import Backend
from problems import GPT_OSS, TINY, answer, errors, inputs, weights
from torch import Tensor

OPS = torch.ops.mxfp4
ALL_RULES = ("even", "floor", "ceil", "rceil")


def block(*values: float) -> Tensor:
    """One block of 32: the values, then zeros."""
    return torch.tensor([*values, *([0.0] * (32 - len(values)))])


def rig(experts: int = 1, *, interleaved: bool = False, w2: bool = True, bias2: bool = False) -> ExpertWeights:
    """Output column 0 is act(x0, x1): gate row 0 reads x0, up row 0 reads x1, row 0 of w2 reads the first
    intermediate."""
    w13 = torch.zeros(experts, 64, 16, dtype=torch.uint8)
    w13[:, 0, 0] = 0x02  # column 0, low nibble: code 2 is 1.0
    w13[:, 1 if interleaved else 32, 0] = 0x20  # column 1, high nibble
    down = torch.zeros(experts, 32, 16, dtype=torch.uint8)
    down[:, 0, 0] = 0x02 if w2 else 0
    return ExpertWeights(
        w13,
        torch.full((experts, 64, 1), 127, dtype=torch.uint8),
        None,
        down,
        torch.full((experts, 32, 1), 127, dtype=torch.uint8),
        torch.ones(experts, 32) if bias2 else None,
    )


def run_rig(
    packed: PackedExperts, pairs: list[tuple[float, float]], ids: list[list[int]], wts: list[list[float]]
) -> Tensor:
    x = torch.zeros(len(pairs), 32, dtype=torch.bfloat16)
    x[:, :2] = torch.tensor(pairs)
    out = packed(x, torch.tensor(ids), torch.tensor(wts))
    assert torch.equal(out[:, 1:], torch.zeros_like(out[:, 1:])) or packed.w2_bias is not None
    return out[:, 0].float()


def on(
    backend: Backend, experts: ExpertWeights, activation: Activation | str = "silu", *, interleaved: bool = False
) -> PackedExperts:
    return prepare(experts, activation=activation, prefer=backend.name, interleaved=interleaved)


@pytest.fixture(params=backends_for("cpu"), ids=lambda b: b.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """The hand-written cases are CPU cases; test_backends runs every device."""
    return request.param


def test_v01_nibble_order() -> None:
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, 0] = 0x21
    out = OPS.dequant(blocks, torch.full((1, 1), 127, dtype=torch.uint8), dtype=torch.float32)
    assert out[0].tolist() == [0.5, 1.0] + [0.0] * 30


def test_v02_scale_sentinel() -> None:
    out = OPS.dequant(
        torch.tensor([[0x22] * 16, [0x00] * 16], dtype=torch.uint8), torch.tensor([[134], [255]], dtype=torch.uint8)
    )
    assert out[0].tolist() == [128.0] * 32
    assert torch.isnan(out[1]).all()


def test_v03_scale_dtypes() -> None:
    blocks = torch.randint(0, 256, (2, 32), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 2), dtype=torch.uint8)
    plain = OPS.dequant(blocks, scales)
    assert torch.equal(plain, OPS.dequant(blocks, scales.view(torch.float8_e8m0fnu)))
    assert torch.equal(plain, OPS.dequant(blocks.view(torch.float4_e2m1fn_x2), scales))
    with pytest.raises(TypeError, match=r"uint8.*float32"):
        OPS.dequant(blocks, scales.float())


@pytest.mark.parametrize("rule", ALL_RULES)
def test_v04_ties_go_to_the_even_code(rule: str) -> None:
    half = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = block(*half, *(-v for v in half))
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert OPS.qdq(x, scale_rule=rule).tolist() == block(*wanted, *(-v for v in wanted)).tolist()
    # 6 = 1.5 * 2^2 is no power of two, so "ceil" takes the next scale, where the same values come out.
    assert OPS.quant(x, scale_rule=rule)[1].tolist() == [128 if rule == "ceil" else 127]


@pytest.mark.parametrize(
    ("top", "rule", "byte", "value"),
    [
        (7.0, "even", 128, 8.0), (7.0, "floor", 127, 6.0), (7.0, "ceil", 128, 8.0), (7.0, "rceil", 128, 8.0),
        (6.9375, "even", 127, 6.0), (6.9375, "floor", 127, 6.0), (6.9375, "ceil", 128, 6.0), (6.9375, "rceil", 128,
        6.0), (3.5, "even", 127, 4.0), (3.5, "floor", 126, 3.0), (3.5, "ceil", 127, 4.0), (3.5, "rceil", 127, 4.0),
    ],
)  # fmt: skip
def test_v05_scale_rules(top: float, rule: str, byte: int, value: float) -> None:
    assert OPS.quant(block(top), scale_rule=rule)[1].tolist() == [byte]
    assert OPS.qdq(block(top), scale_rule=rule)[0].item() == value


def test_v05_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"scale_rule must be one of even, floor, ceil, rceil, .*, got 'nearest'"):
        OPS.quant(block(1.0), scale_rule="nearest")


@pytest.mark.parametrize("rule", ALL_RULES)
def test_v06_zero_block(rule: str) -> None:
    x = torch.zeros(2, 64)
    x[1, 32:] = 1.5
    scales = OPS.quant(x, scale_rule=rule)[1]
    assert int(scales.max()) < 255
    assert torch.equal(OPS.qdq(x, scale_rule=rule), x)


def test_v07_zero_tokens(backend: Backend) -> None:
    problem = TINY.with_(experts=4, hidden=64, intermediate=32, top_k=2, tokens=0)
    packed = on(backend, weights(problem))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.empty(0, 64, dtype=dtype)
        out = packed(x, torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
        assert out.shape == (0, 64) and out.dtype is dtype and out is not x
    blocks, scales = OPS.quant(torch.empty(0, 64))
    assert blocks.shape == (0, 32) and scales.shape == (0, 2) and blocks.dtype is scales.dtype is torch.uint8


def test_v08_skipped_slots(backend: Backend) -> None:
    packed = on(backend, rig(4))
    ids = [[0, -1], [1, 2], [-1, -1]]
    out = run_rig(packed, [(2, 3)] * 3, ids, [[0.5, 0.5]] * 3)
    assert out.tolist() == pytest.approx([2.642, 5.285, 0.0], rel=5e-3)
    assert out[2].item() == 0.0
    x = torch.randn(3, 32)
    wide = packed(x, torch.tensor(ids), torch.full((3, 2), 0.5))
    assert torch.equal(wide, packed(x, torch.tensor(ids, dtype=torch.int32), torch.full((3, 2), 0.5)))
    poisoned = torch.where(torch.tensor(ids) < 0, torch.nan, 0.5)
    assert torch.equal(wide, packed(x, torch.tensor(ids), poisoned))
    for dtype in (torch.uint8, torch.float32):
        with pytest.raises(TypeError, match=rf"topk_ids must be int32 or int64, got {str(dtype)[6:]}"):
            packed(x, torch.tensor(ids).to(dtype), torch.full((3, 2), 0.5))


def test_v09_gate_up_order(backend: Backend) -> None:
    halves, turns = on(backend, rig()), on(backend, rig(interleaved=True), interleaved=True)
    for packed in (halves, turns):
        assert run_rig(packed, [(2, 3)], [[0]], [[1.0]]).item() == pytest.approx(5.285, rel=5e-3)
    wrongly_declared = on(backend, rig(interleaved=True))
    assert run_rig(wrongly_declared, [(2, 3)], [[0]], [[1.0]]).item() == 0.0


def test_v10_size_2880(backend: Backend) -> None:
    problem = GPT_OSS.with_(tokens=1, activation="silu")
    experts, (x, _, routing) = weights(problem), inputs(problem)
    ids = torch.tensor([[1, 0]])
    out = on(backend, experts)(x, ids, routing)
    assert out.shape == (1, 2880) and out.is_contiguous()
    assert errors(out, answer(experts, x, ids, routing, Activation("silu")))[0] < backend.tolerance.bfloat16


def test_v11_down_bias(backend: Backend) -> None:
    packed = on(backend, rig(2, w2=False, bias2=True))
    out = run_rig(packed, [(0, 0)] * 2, [[0, 1], [0, -1]], [[0.3, 0.7]] * 2)
    assert out.tolist() == pytest.approx([1.0, 0.3], rel=5e-3)


@pytest.mark.parametrize(
    ("activation", "x", "wanted"),
    [
        (Activation("silu", limit=10), (-20, 25), -4.12e-7),
        (Activation("silu", limit=10), (12, -30), -99.995),
        (Activation("silu", limit=1), (5, 3), 0.7311),
        (Activation("silu", limit=100), (5, 3), 14.900),
        (Activation("silu"), (5, 3), 14.900),
        (Activation("swigluoai", limit=7), (10, -9), -42.000),
        (Activation("swigluoai", limit=7), (-10, 9), -3.25e-6),
        (Activation("swigluoai", limit=7), (1, 1), 1.6916),
    ],
)
def test_v12_clamps(backend: Backend, activation: Activation, x: tuple[float, float], wanted: float) -> None:
    found = run_rig(on(backend, rig(), activation), [x], [[0]], [[1.0]]).item()
    assert found == pytest.approx(wanted, rel=8e-3)  # two bfloat16 roundings


def test_v13_save_and_reload(backend: Backend) -> None:
    problem = TINY.with_(experts=3, hidden=96, intermediate=64, top_k=2)
    experts = weights(problem)
    packed = on(backend, experts)
    file = io.BytesIO()
    torch.save(packed.tensors(), file)
    file.seek(0)
    tensors = torch.load(file, weights_only=True)
    again = PackedExperts.from_tensors(tensors, packed.layout, 96, 64, Activation("silu"))
    assert torch.equal(packed(*inputs(problem)), again(*inputs(problem)))
    assert all(type(t) is Tensor for t in packed.tensors())
    canonical = [experts.w13, experts.w13_scale, experts.w2, experts.w2_scale]
    assert packed.nbytes() >= sum(t.numel() for t in canonical)


def test_v14_the_fake_kernel_tells_the_truth(backend: Backend) -> None:
    problem = TINY.with_(experts=3, hidden=96, intermediate=64, top_k=2)
    packed, args = on(backend, weights(problem)), inputs(problem)
    out = packed(*args)
    assert out.shape == (5, 96) and out.stride() == (96, 1)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = PackedExperts.from_tensors(
            [mode.from_tensor(t) for t in packed.tensors()], packed.layout, 96, 64, Activation("silu")
        )(*(mode.from_tensor(a) for a in args))
    assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype)


def test_v15_error_texts(backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"multiple of 32, got 48"):
        OPS.quant(torch.zeros(4, 48))
    good = weights(TINY.with_(experts=4, hidden=64, intermediate=64, top_k=2))
    with pytest.raises(ValueError, match=r"w13_scale must be .*, 2\], got .*, 3\]"):
        prepare(ExpertWeights(**{**good.tensors(), "w13_scale": torch.zeros(4, 128, 3, dtype=torch.uint8)}))
    wide = on(backend, weights(TINY.with_(experts=4, hidden=96, intermediate=64)))
    with pytest.raises(ValueError, match=r"x must be \[T, H\] with H = hidden = 96, got \[2, 64\]") as caught:
        wide(torch.zeros(2, 64), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    assert "48" not in str(caught.value)
    with pytest.raises(ValueError, match=r"below the number of experts E = 4, got 4"):
        wide(torch.zeros(2, 96), torch.full((2, 1), 4), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"one of native_cpu, reference, got 'nope'"):
        prepare(good, prefer="nope")


def test_w01_works_where_importing_triton_fails() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, mxfp4_ops\n"
        "blocks, scales = mxfp4_ops.quant_mxfp4(torch.ones(1, 64, 32))\n"
        "down, down_scales = mxfp4_ops.quant_mxfp4(torch.ones(1, 32, 32))\n"
        "packed = mxfp4_ops.prepare(mxfp4_ops.ExpertWeights(blocks, scales, None, down, down_scales, None))\n"
        "print(packed(torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "torch.Size([2, 32])" in done.stdout, done.stderr


@pytest.mark.parametrize("rule", ["even", "floor", "rceil"])
def test_w02_values_that_are_mxfp4_already_come_back(rule: str) -> None:
    """Every rule but "ceil", which moves a block whose largest value is not a power of two to the next scale."""
    x = OPS.qdq(torch.randn(64, 96), scale_rule=rule)
    first, second = OPS.quant(x, scale_rule=rule), OPS.quant(OPS.qdq(x, scale_rule=rule), scale_rule=rule)
    assert torch.equal(OPS.qdq(x, scale_rule=rule), x)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_w03_unprepare_returns_the_checkpoint_bytes(backend: Backend) -> None:
    experts = weights(TINY)
    again = unprepare(on(backend, experts))
    assert all(torch.equal(a, b) for a, b in zip(experts.tensors().values(), again.tensors().values(), strict=True))


def test_w04_preparing_twice_is_refused(backend: Backend) -> None:
    packed = on(backend, weights(TINY))
    with pytest.raises(TypeError, match=rf"must be canonical.*{packed.layout}.*unprepare"):
        prepare(packed)


def test_w05_inputs_keep_their_bytes(backend: Backend) -> None:
    packed, args = on(backend, weights(TINY)), inputs(TINY)
    before = [t.clone() for t in (*args, *packed.tensors())]
    out = packed(*args)
    after = (*args, *packed.tensors())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    storages = {t.untyped_storage().data_ptr() for t in after if t.numel()}
    assert out.untyped_storage().data_ptr() not in storages


def test_w06_backward_reaches_x(backend: Backend) -> None:
    packed, (x, ids, routing) = on(backend, weights(TINY)), inputs(TINY, torch.float32)
    packed(x.requires_grad_(), ids, routing).sum().backward()
    leaf = x.detach().double().requires_grad_()
    answer(weights(TINY), leaf, ids, routing, Activation("silu")).sum().backward()
    assert x.grad is not None and leaf.grad is not None
    torch.testing.assert_close(x.grad.double(), leaf.grad, rtol=1e-4, atol=1e-4)


def test_w07_all_tokens_on_one_expert(backend: Backend) -> None:
    problem = TINY.with_(experts=4, tokens=17, top_k=1)
    experts, (x, ids, routing) = weights(problem), inputs(problem)
    ids = torch.full_like(ids, 3)
    out = on(backend, experts)(x, ids, routing)
    assert errors(out, answer(experts, x, ids, routing, Activation("silu")))[0] < backend.tolerance.bfloat16


def test_w08_weights_are_used_as_given(backend: Backend) -> None:
    packed = on(backend, rig(2))
    half, whole = (run_rig(packed, [(2, 3)], [[0, 1]], [[w, w]]).item() for w in (0.25, 0.5))
    assert whole == pytest.approx(2 * half, rel=5e-3) and math.isclose(half, 2.642, rel_tol=5e-3)


def test_w09_rows_do_not_depend_on_the_batch(backend: Backend) -> None:
    problem = TINY.with_(tokens=33)
    packed, (x, ids, routing) = on(backend, weights(problem)), inputs(problem)
    whole = packed(x, ids, routing, batch_invariant=True)
    for t in (1, 2):
        assert torch.equal(packed(x[:t], ids[:t], routing[:t], batch_invariant=True), whole[:t])


def test_w10_prepare_keeps_no_reference_to_the_checkpoint(backend: Backend) -> None:
    experts = weights(TINY)
    alive = {name: weakref.ref(t) for name, t in experts.tensors().items() if t is not None}
    packed = on(backend, experts)
    del experts
    gc.collect()
    # The canonical layout is the checkpoint's own: there the tensors are relabelled, not copied.
    kept = {name for name, ref in alive.items() if ref() is not None}
    assert kept == (set(alive) if packed.layout == "canonical" else set())
