"""The whole layer on every instruction set of this machine, without torch, against a float64 layer."""

import itertools

import kernels_reference as ref
import mxfp4_ops._kernels as kernels  # an error, not a skip, when it was not built
import numpy as np
import pytest
from isa_layer import TOLERANCE, Layer, decode, encode, relative_error, routing
from kernels_reference import BF16, EXTREME_SCALES, F16, F32, F64

every_isa = pytest.mark.parametrize("isa", kernels.isas())


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("name", ref.ACTIVATIONS)
@every_isa
def test_moe(isa, name, dtype):
    rng = np.random.default_rng(12)
    layer = Layer(name)
    for tokens, on_input, invariant in [(1, False, False), (13, True, False), (70, False, True)]:
        ids, weights = routing(rng, tokens, 3, layer.experts)
        if tokens == 1:
            ids[0, 0] = 1
        raw = encode(rng.standard_normal((tokens, layer.hidden)), dtype)
        bias_dtype = [F32, BF16, F16, F64][(layer.code + tokens) % 4]
        args = dict(dtype=dtype, on_input=on_input, invariant=invariant, bias_dtype=bias_dtype)
        one = layer.run(isa, raw, ids, weights, threads=1, fill=255, **args)
        two = layer.run(isa, raw, ids, weights, threads=2, fill=0, **args)
        assert np.array_equal(one, two)
        if bias_dtype == BF16:
            layer_b = Layer(name)
            layer_b.b13, layer_b.b2 = (ref.bf16_values(ref.bf16_bits(b)) for b in (layer.b13, layer.b2))
        want = (layer_b if bias_dtype == BF16 else layer).expected(decode(raw, dtype), ids, weights, dtype, on_input)
        assert relative_error(decode(one, dtype), want) < TOLERANCE[dtype]
        if tokens > 2:
            assert (decode(one, dtype)[2] == 0).all()


@pytest.mark.parametrize(
    "hidden,intermediate,experts,top_k", [(64, 64, 1, 1), (32, 32, 3, 2), (224, 352, 4, 4), (576, 64, 2, 1)]
)
@every_isa
def test_moe_shapes(isa, hidden, intermediate, experts, top_k):
    rng = np.random.default_rng(13)
    layer = Layer("swigluoai", hidden, intermediate, experts, bias=False)
    for tokens, dtype in itertools.product((0, 1, 2, 9, 600), (F32, BF16)):
        if tokens == 600 and hidden * intermediate > 64 * 64:
            continue
        ids, weights = routing(rng, tokens, top_k, experts)
        raw = encode(rng.standard_normal((tokens, hidden)), dtype)
        got = layer.run(isa, raw, ids, weights, dtype, threads=2)
        if tokens and (ids >= 0).any():
            want = layer.expected(decode(raw, dtype), ids, weights, dtype)
            assert relative_error(decode(got, dtype), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@every_isa
def test_moe_is_batch_invariant(isa, dtype):
    rng = np.random.default_rng(14)
    layer = Layer("silu", 128, 128, 2)
    ids, weights = rng.integers(0, 2, (60, 2)).astype(np.int32), rng.random((60, 2)).astype(np.float32)
    raw = encode(rng.standard_normal((60, 128)), dtype)
    if dtype != F16:
        raw[7, 5], raw[9, 5] = encode(np.array([2.0**-130, 2.0**110]), dtype)
    whole = layer.run(isa, raw, ids, weights, dtype, invariant=True, threads=2)
    for begin, end in [(0, 1), (3, 8), (7, 8), (9, 10), (5, 38)]:
        rows = slice(begin, end)
        part = layer.run(isa, raw[rows].copy(), ids[rows].copy(), weights[rows].copy(), dtype, invariant=True)
        assert np.array_equal(part, whole[begin:end])


@pytest.mark.parametrize("tokens", [1, 4, 40])
@every_isa
def test_moe_extreme_rows(isa, tokens):
    """Rows that kernels with a limited range would get wrong, next to normal ones, in x and in h."""
    rng = np.random.default_rng(15)
    layer = Layer("relu2_no_mul", 128, 64, 1, bias=False)
    ids, weights = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)
    values = (30000.0, 2.0**-130, 2.0**-20, 2.0**50)
    for dtype, value, factor in itertools.product((F32, BF16), values, (1.0, 2.0**-50)):
        x = np.where(rng.random((tokens, 128)) < 0.5, value, 0.5 if value > 2**-129 else 1.0) * factor
        x[0] = value
        raw = encode(x, dtype)
        got, want = layer.run(isa, raw, ids, weights, dtype), layer.expected(decode(raw, dtype), ids, weights, dtype)
        for t in range(tokens):
            if np.linalg.norm(want[t]) > 1e-30:
                assert relative_error(decode(got, dtype)[t].astype(np.float64), want[t]) < TOLERANCE[dtype] * 2
            else:
                np.testing.assert_allclose(decode(got, dtype)[t], want[t], rtol=0.02, atol=1e-36)
    for value in (np.inf, np.nan):
        raw = encode(rng.standard_normal((tokens, 128)), BF16)
        raw[0, 3] = encode(np.array([value]), BF16)[0]
        got = decode(layer.run(isa, raw, ids, weights, BF16), BF16)
        assert not np.isfinite(got[0]).any() and np.isfinite(got[1:]).all()


@pytest.mark.parametrize("byte", EXTREME_SCALES)
@every_isa
def test_moe_extreme_scales(isa, byte):
    rng = np.random.default_rng(16)
    layer = Layer("silu", 128, 64, 2, bias=False)
    for tokens in (1, 60):
        ids, weights = rng.integers(0, 2, (tokens, 1)).astype(np.int32), np.ones((tokens, 1), np.float32)
        layer.scales13[:], layer.scales2[:] = 122, 122
        layer.scales2[:, 5] = byte
        layer.pack()
        # small enough for partial sums to fit where the weights do
        raw = encode(rng.standard_normal((tokens, 128)) * (2.0**-20 if byte > 200 else 1), F32)
        got, want = layer.run(isa, raw, ids, weights, F32), layer.expected(raw, ids, weights, F32)
        ordinary = np.arange(128) != 5
        assert relative_error(got[:, ordinary], want[:, ordinary]) < 1e-5
        fits = np.abs(want[:, 5]) < 1e37
        np.testing.assert_allclose(got[fits, 5], want[fits, 5], rtol=1e-3, atol=1e-42)
        assert byte < 253 or not np.isfinite(got[:, 5]).all()


@pytest.mark.parametrize("dtype", [BF16, F16])
@every_isa
def test_moe_single_rows(isa, dtype):
    """One row per expert, where x and h may be taken in integers: long rows, both kinds of h, any number of threads."""
    rng = np.random.default_rng(17)
    for name, (hidden, intermediate) in itertools.product(("swigluoai", "relu2_no_mul"), ((704, 992), (96, 608))):
        layer = Layer(name, hidden, intermediate, experts=7)
        for tokens in (1, 2, 3):
            ids = rng.permutation(7)[: tokens * 2].reshape(tokens, 2).astype(np.int32)
            weights = rng.random((tokens, 2)).astype(np.float32)
            raw = encode(rng.standard_normal((tokens, hidden)), dtype)
            one = layer.run(isa, raw, ids, weights, dtype, threads=1, fill=255)
            for threads, fill in ((2, 0), (3, 255), (2, 1)):
                assert np.array_equal(one, layer.run(isa, raw, ids, weights, dtype, threads=threads, fill=fill))
            want = layer.expected(decode(raw, dtype), ids, weights, dtype)
            assert relative_error(decode(one, dtype), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("kinds", ["23", "203"], ids=["all in integers", "one not"])
@every_isa
def test_moe_rows_of_different_planes_share_an_expert(isa, kinds):
    """Rows that integers hold in two planes, in three, or not at all, in groups around every limit on their number."""
    rng = np.random.default_rng(19)
    layer = Layer("swigluoai", 352, 96, experts=2)
    for tokens in (2, 3, 5, 9, 17, 48, 49, 70):
        x = rng.standard_normal((tokens, 352))
        for t, kind in zip(range(tokens), itertools.cycle(kinds), strict=False):
            if kind == "3":
                x[t] *= np.abs(rng.standard_normal(352)) ** 2
            if kind == "0":
                x[t] *= np.exp2(rng.uniform(-40, 0, 352))
        raw = encode(x, BF16)
        ids, weights = np.ones((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)
        got = layer.run(isa, raw, ids, weights, BF16, threads=2)
        assert np.array_equal(got, layer.run(isa, raw, ids, weights, BF16, threads=3, fill=1))
        got, want = decode(got, BF16), layer.expected(decode(raw, BF16), ids, weights, BF16)
        for t in range(tokens):
            assert relative_error(got[t].astype(np.float64), want[t]) < TOLERANCE[BF16] * 2


@every_isa
def test_moe_slots_that_part_between_the_products(isa):
    """Two slots of one expert whose h then need different kernels, one of them in fp32."""
    rng = np.random.default_rng(18)
    layer = Layer("relu2_no_mul", 128, 64, 2, bias=False)
    ids, weights = np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)
    x = rng.standard_normal((2, 128))
    x[1] *= 2.0**52  # its squares exceed 2^100
    raw = encode(x, BF16)
    got, want = layer.run(isa, raw, ids, weights, BF16), layer.expected(decode(raw, BF16), ids, weights, BF16)
    for t in range(2):
        assert relative_error(decode(got, BF16)[t].astype(np.float64), want[t]) < TOLERANCE[BF16]
