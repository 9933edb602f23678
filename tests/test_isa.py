"""Every kernel of every instruction set of this machine, called one by one without torch.

Conversions and the number format are exact; products are held to float64 sums; the layer to a float64 layer. Inputs lie
directly before a page that cannot be read, so that reading past an end is a crash.
"""

import ctypes
import itertools
import mmap
import os
import subprocess
import sys
from fractions import Fraction

import kernels_reference as ref
import mxfp4_ops._kernels as kernels  # an error, not a skip, when it was not built
import numpy as np
import pytest

F32, BF16, F16, F64 = range(4)
ISAS = kernels.isas()
RULES = range(4)  # even, floor, ceil, rceil
ROW_COUNTS = [*range(1, 13), 17, 49, 96, 192]
EXTREME_SCALES = [0, 1, 2, 249, 250, 251, 252, 253, 254, 255]

every_isa = pytest.mark.parametrize("isa", ISAS)


def guarded(array: np.ndarray) -> np.ndarray:
    """Copy an array to memory that ends at an inaccessible page."""
    size = -(-max(array.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    view = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(view.ctypes.data + size, mmap.PAGESIZE, 0) == 0
    copy = view[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def bits(array: np.ndarray) -> np.ndarray:
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_same_floats(got: np.ndarray, want: np.ndarray) -> None:
    """Bits are equal, except that any NaN is as good as another."""
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(bits(got)[~nan], bits(want)[~nan])


# ------------------------------------------------------------------------------------------------- the number format


def fp32_from_fraction(value: Fraction) -> float:
    """The fp32 that equals the value; Inf when it is too large."""
    if abs(value) >= 2**128:
        return float("inf") if value > 0 else float("-inf")
    result = np.float32(float(value))
    assert Fraction(float(result)) == value
    return float(result)


def test_scalar_dequant_is_exact():
    halves = [0, 1, 2, 3, 4, 6, 8, 12]
    for byte in range(256):
        codes = np.arange(32, dtype=np.uint8) % 16
        blocks = codes[0::2] | codes[1::2] << 4
        got = kernels.dequant("scalar", blocks, np.array([byte], np.uint8))
        if byte == 255:
            assert np.isnan(got).all()
            continue
        scale = Fraction(2) ** (byte - 127)
        want = [fp32_from_fraction(Fraction(halves[c & 7], 2) * scale * (-1 if c & 8 else 1)) for c in codes]
        assert got.tolist() == want
        assert np.array_equal(np.signbit(got), codes >= 8)


@every_isa
def test_dequant(isa):
    rng = np.random.default_rng(0)
    scales = np.arange(256, dtype=np.uint8)
    codes = np.concatenate([rng.permutation(np.arange(32) % 16) for _ in scales]).astype(np.uint8)
    blocks = codes[0::2] | codes[1::2] << 4
    want = ref.dequant(codes.reshape(256, 32), scales[:, None]).reshape(-1)
    got = kernels.dequant(isa, guarded(blocks), guarded(scales))
    assert_same_floats(got, want)
    with np.errstate(over="ignore"):
        half = kernels.from_float(isa, got, F16).view(np.float16)
        assert_same_floats(half, want.astype(np.float16))
    assert_same_floats(ref.bf16_values(kernels.from_float(isa, got, BF16)), ref.bf16_values(ref.bf16_bits(want)))


def interesting_floats() -> np.ndarray:
    """Random bit patterns, ties of bf16 and fp16, subnormals, the ends of the ranges, Inf and NaN."""
    rng = np.random.default_rng(1)
    anything = rng.integers(0, 2**32, 20000, dtype=np.uint32)
    bf16_ties = rng.integers(0, 2**16, 2000, dtype=np.uint32) << 16 | 0x8000
    exponents = rng.integers(100, 145, 4000, dtype=np.uint32) << 23
    fp16_ties = exponents | rng.integers(0, 2**10, 4000, dtype=np.uint32) << 13 | 0x1000
    corners = np.array([0, 1, 2**31, 2**31 + 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x477FEFFF,
                        0x477FF000, 0x38800000, 0x387FFFFF, 0x33000000, 0x33000001, 0x7F7F8000], np.uint32)  # fmt: skip
    return np.concatenate([anything, bf16_ties, fp16_ties, corners]).view(np.float32)


@every_isa
def test_conversions(isa):
    x = interesting_floats()
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_floats(kernels.from_float(isa, guarded(x), F16).view(np.float16), x.astype(np.float16))
    assert_same_floats(ref.bf16_values(kernels.from_float(isa, guarded(x), BF16)), ref.bf16_values(ref.bf16_bits(x)))
    patterns = np.arange(2**16, dtype=np.uint16)
    for n in (0, 1, 7, 8, 9, 2**16):  # a rest behind whole vectors
        part = guarded(patterns[-n:] if n else patterns[:0])
        assert_same_floats(kernels.to_float(isa, part, BF16), ref.bf16_values(part))
        with np.errstate(invalid="ignore"):
            assert_same_floats(kernels.to_float(isa, part, F16), part.view(np.float16).astype(np.float32))
        assert np.array_equal(kernels.from_float(isa, ref.bf16_values(part), BF16) | 0x40, part | 0x40)
    doubles = guarded(np.random.default_rng(2).standard_normal(33))
    assert np.array_equal(kernels.to_float(isa, doubles, F64), doubles.astype(np.float32))


def quant_blocks() -> np.ndarray:
    """Blocks at every tie of every exponent, and blocks of everything."""
    rng = np.random.default_rng(3)
    ties = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 7.5], np.float32)
    near = np.concatenate([ties, np.nextafter(ties, np.float32(9)), np.nextafter(ties, np.float32(-9))])
    near = np.resize(np.concatenate([near, -near]), (3, 32)).astype(np.float32)
    with np.errstate(under="ignore", over="ignore"):
        powers = np.ldexp(near[None], np.arange(-149, 126)[:, None, None]).astype(np.float32).reshape(-1, 32)
    normal = rng.standard_normal((400, 32)).astype(np.float32)
    spread = (rng.standard_normal((400, 32)) * np.exp2(rng.integers(-140, 120, (400, 1)))).astype(np.float32)
    edges = np.exp2(rng.integers(-149, 127, (400, 1))) * np.array(
        [1, 1.25, 1.5, 1.75, 1 + 2**-23, 1.5 + 2**-22, 2 - 2**-23, 0]
    )
    edges = np.tile(edges, 4).astype(np.float32)
    subnormal = rng.integers(0, 2**23, (50, 32)).astype(np.uint32).view(np.float32)
    special = rng.standard_normal((6, 32)).astype(np.float32)
    special[0, 3], special[1, 31], special[2, 0], special[3] = np.inf, -np.inf, np.nan, 0
    special[4], special[5, 0] = -0.0, -np.nan
    return np.concatenate([powers, normal, spread, edges, subnormal, special])


def expected_scale(amax: np.uint32, rule: int) -> int:
    if amax >= 0x7F800000:
        return 255
    exponent, mantissa = int(amax) >> 23, int(amax) & 0x7FFFFF
    by_rule = [(int(amax) + 0x200000) >> 23, exponent, exponent + (mantissa != 0), exponent + (mantissa > 0x400000)]
    return max(by_rule[rule] - 2, 0)


@pytest.mark.parametrize("rule", RULES)
@every_isa
def test_quant(isa, rule):
    x = quant_blocks()
    blocks, scales = kernels.quant(isa, guarded(x), rule)
    magnitudes = bits(x) & 0x7FFFFFFF
    want_scales = np.array([expected_scale(m, rule) for m in magnitudes.max(1)], np.uint8)
    assert np.array_equal(scales, want_scales)
    # |x| / scale is exact in float64, also for subnormals
    v = np.abs(x.astype(np.float64)) * np.exp2(127.0 - want_scales.astype(np.float64))[:, None]
    below = [v > 0.25, v >= 0.75, v > 1.25, v >= 1.75, v > 2.5, v >= 3.5, v > 5]
    codes = np.sum(below, axis=0).astype(np.uint8) | np.signbit(x).astype(np.uint8) << 3
    codes[want_scales == 255] = 0
    assert np.array_equal(blocks, (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1))


@every_isa
def test_range(isa):
    tiny = 2.0**-100
    for n in (1, 7, 32, 45):
        for value, flags in [(1, 0), (0, 0), (np.inf, 0), (np.nan, 0), (2.0**100, 0), (2.0**101, 2), (-3e38, 2), (tiny, 0),
                             (2.0**-101, 1), (-1e-45, 1)]:  # fmt: skip
            for place in {0, n - 1, n // 2}:
                x = np.ones(n, np.float32)
                x[place] = value
                assert kernels.range(isa, guarded(x), tiny) == flags, (n, value, place)
    assert kernels.range(isa, np.array([1e-45, 0, 3e38], np.float32), 0.0) == 2


@every_isa
def test_accumulate(isa):
    rng = np.random.default_rng(4)
    for n in (1, 31, 512):
        acc, y = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
        want = acc.astype(np.float64) + 0.3 * y
        acc = guarded(acc)
        kernels.accumulate(isa, acc, guarded(y), 0.3)
        np.testing.assert_allclose(acc, want, rtol=0, atol=4e-7)


# ------------------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("code,name", list(enumerate(ref.ACTIVATIONS)))
@every_isa
def test_activation(isa, code, name):
    rng = np.random.default_rng(5)
    values = np.concatenate([rng.standard_normal((60, 32)) * s for s in (0.01, 1, 8, 40)]).astype(np.float32)
    for alpha, beta, limit in [(1.702, 1.0, 7.0), (1.5, 2.0, np.inf), (2.0, np.inf, 3.0)]:
        if name == "swigluoai" and not np.isfinite(beta):
            continue
        split = values.reshape(-1, 2, 16) if code < ref.GATED else values
        want = ref.activation(name, split, alpha, beta, limit)
        got = values.copy()
        kernels.activate(isa, got, code, alpha, beta, limit)
        got = got[:, : want.shape[-1]]
        # 1 + erf and 1 + tanh cancel for negative gates, so a part of the bound is relative to their arguments
        magnitude = np.abs(split)
        size = magnitude[:, 0] * (magnitude[:, 1] + 1) if code < ref.GATED else magnitude
        assert (np.abs(got - want) <= 1e-6 * np.abs(want) + 1.5e-7 * size).all()


@every_isa
def test_silu_relative_error(isa):
    """The exponential is accurate to 2e-7 where results are small, too."""
    x = np.linspace(-87, 88, 32 * 4000, dtype=np.float32).reshape(-1, 32)
    got = x.copy()
    kernels.activate(isa, got, ref.ACTIVATIONS.index("silu_no_mul"), 0, 0, np.inf)
    want = ref.activation("silu_no_mul", x, 0, 0, np.inf)
    keep = want != 0
    assert (np.abs(got - want)[keep] / np.abs(want)[keep]).max() < 4e-7


@every_isa
def test_activation_special_values(isa):
    inf, nan = np.inf, np.nan
    silu, unary, relu2 = (ref.ACTIVATIONS.index(n) for n in ("silu", "silu_no_mul", "relu2_no_mul"))

    def gated(g, u, limit):
        tile = np.repeat(np.array([[g, u]], np.float32), 16, axis=1).copy()
        kernels.activate(isa, tile, silu, 0, 0, limit)
        return tile[0, 0]

    assert np.isnan(gated(nan, 1, 7)) and np.isnan(gated(1, nan, 7)) and np.isnan(gated(-inf, 1, 7))
    assert gated(inf, 1, inf) == inf and gated(200, 1, inf) == 200 and gated(-200, 1, inf) == 0
    assert abs(gated(inf, -inf, 7) + 49 / (1 + np.exp(-7.0))) < 1e-4
    for code, x, want in [(unary, nan, nan), (unary, -inf, nan), (unary, inf, inf), (relu2, nan, nan), (relu2, -3, 0)]:
        tile = np.full((1, 32), x, np.float32)
        kernels.activate(isa, tile, code, 0, 0, inf)
        np.testing.assert_equal(tile, np.full((1, 32), want, np.float32))


# ---------------------------------------------------------------------------------------------------------- products


def random_tile(rng, k, low=118, high=136):
    codes = rng.integers(0, 16, (32, k)).astype(np.uint8)
    return codes, rng.integers(low, high, (32, k // 32)).astype(np.uint8)


def check_dot(isa, kind, codes, scales, x, tolerance=2e-6):
    """fp32 and, where it runs, bf16 kernel against float64, relative to the sum of magnitudes."""
    tile = guarded(ref.pack_tiles(codes, scales).reshape(-1))
    weights = ref.dequant(codes, scales).astype(np.float64)
    words = ref.bf16_bits(x)
    results = [(kernels.dot(isa, kind, tile, guarded(x)), x)]
    if (bf16 := kernels.dot_bf16(isa, kind, tile, guarded(words))) is not None:
        results.append((bf16, ref.bf16_values(words)))
    for got, values in results:
        with np.errstate(invalid="ignore", over="ignore"):
            want = np.einsum("mk,rk->mr", values.astype(np.float64), weights)
            size = np.einsum("mk,rk->mr", np.abs(values).astype(np.float64), np.abs(weights))
            finite = np.isfinite(size) & (size < 3e38)
            # in fp32 an Inf weight gives Inf or NaN; where sums overflow, either is right
            assert not np.isfinite(got[~np.isfinite(size)]).any()
            assert (np.abs(got - want)[finite] <= tolerance * size[finite] + 1e-43).all()
    return len(results) == 2


@pytest.mark.parametrize("kind", ["few", "many"])
@every_isa
def test_dot(isa, kind):
    rng = np.random.default_rng(6)
    for m, k in itertools.product(ROW_COUNTS, (64, 192, 576, 1088)):
        if m > 17 and k not in (64, 576):
            continue
        took_bf16 = check_dot(isa, kind, *random_tile(rng, k), rng.standard_normal((m, k)).astype(np.float32))
        assert took_bf16 == (isa == "avx512_bf16")


@pytest.mark.parametrize("kind", ["few", "many"])
@every_isa
def test_dot_single_elements(isa, kind):
    """Every code of every place of a superblock lands in its own output, exactly."""
    identity = np.eye(64, dtype=np.float32)
    rng = np.random.default_rng(7)
    codes, scales = random_tile(rng, 64)
    got = kernels.dot(isa, kind, guarded(ref.pack_tiles(codes, scales).reshape(-1)), guarded(identity))
    assert np.array_equal(got, ref.dequant(codes, scales).T)


@pytest.mark.parametrize("kind", ["few", "many"])
@every_isa
def test_dot_extreme_scales(isa, kind):
    rng = np.random.default_rng(8)
    for byte, m in itertools.product(EXTREME_SCALES, (1, 2, 4, 7)):
        codes, scales = random_tile(rng, 320)
        scales[:, 3] = byte  # one block of otherwise normal rows
        check_dot(isa, kind, codes, scales, rng.standard_normal((m, 320)).astype(np.float32))
        scales[:] = byte
        scale_x = 2.0**-60 if byte > 200 else 1.0
        check_dot(isa, kind, codes, scales, (rng.standard_normal((m, 320)) * scale_x).astype(np.float32))
        scales[5:] = 120  # and a few rows of a tile
        check_dot(isa, kind, codes, scales, (rng.standard_normal((m, 320)) * scale_x).astype(np.float32))


@every_isa
def test_dot_scale_255_makes_nan(isa):
    codes = np.zeros((32, 64), np.uint8)
    scales = np.full((32, 2), 127, np.uint8)
    scales[9, 1] = 255
    tile = ref.pack_tiles(codes, scales).reshape(-1)
    for kind, m in itertools.product(["few", "many"], (1, 5)):
        got = kernels.dot(isa, kind, tile, np.ones((m, 64), np.float32))
        assert np.isnan(got[:, 9]).all() and (np.delete(got, 9, axis=1) == 0).all()


@every_isa
def test_dot_special_rows(isa):
    """Inf and NaN reach their own row only; subnormals count in the kernels that are given them."""
    rng = np.random.default_rng(9)
    codes, scales = random_tile(rng, 128)
    tile, weights = ref.pack_tiles(codes, scales).reshape(-1), ref.dequant(codes, scales).astype(np.float64)
    x = rng.standard_normal((5, 128)).astype(np.float32)
    x[1, 70], x[3, 5] = np.inf, np.nan
    for kind in ("few", "many"):
        got = kernels.dot(isa, kind, tile, x)
        with np.errstate(invalid="ignore"):
            want = np.einsum("mk,rk->mr", x.astype(np.float64), weights)
        assert np.array_equal(np.isnan(got), np.isnan(want)) and np.array_equal(np.isinf(got), np.isinf(want))
        assert np.isfinite(got[[0, 2, 4]]).all()
        check_dot(isa, kind, codes, scales, np.where(rng.random((3, 128)) < 0.5, 30000, 0.5).astype(np.float32))
    scales[:, :2] = 230  # 2^103: the subnormal is what counts
    scales[:, 2:] = 5
    x = np.concatenate([np.full((4, 64), 2.0**-130), np.ones((4, 64))], axis=1).astype(np.float32)
    for kind in ("few", "many"):
        got = kernels.dot(isa, kind, ref.pack_tiles(codes, scales).reshape(-1), x)
        want = x.astype(np.float64) @ ref.dequant(codes, scales).astype(np.float64).T
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-9)
    big = np.full((2, 128), 2.0**126, np.float32)
    scales[:] = 20
    got = kernels.dot(isa, "many", ref.pack_tiles(codes, scales).reshape(-1), big)
    np.testing.assert_allclose(
        got, big.astype(np.float64) @ ref.dequant(codes, scales).astype(np.float64).T, rtol=1e-5, atol=1e14
    )


@every_isa
def test_many_gives_a_row_the_same_bits_whatever_the_others_are(isa):
    rng = np.random.default_rng(10)
    codes, scales = random_tile(rng, 576)
    tile = ref.pack_tiles(codes, scales).reshape(-1)
    x = rng.standard_normal((40, 576)).astype(np.float32)
    whole, words = kernels.dot(isa, "many", tile, x), ref.bf16_bits(x)
    whole_bf16 = kernels.dot_bf16(isa, "many", tile, words)
    for m in (1, 2, 3, 5, 6, 7, 12, 13, 25):
        assert np.array_equal(kernels.dot(isa, "many", tile, x[:m].copy()), whole[:m])
        if whole_bf16 is not None:
            assert np.array_equal(kernels.dot_bf16(isa, "many", tile, words[:m].copy()), whole_bf16[:m])


# --------------------------------------------------------------------------------------------------------- the layer


class Layer:
    """Random weights of one problem, and calls of the layer on them."""

    def __init__(self, name, hidden=96, intermediate=160, experts=5, seed=11, bias=True):
        rng = np.random.default_rng(seed)
        self.name, self.code = name, ref.ACTIVATIONS.index(name)
        self.hidden, self.intermediate, self.experts = hidden, intermediate, experts
        halves = 2 if self.code < ref.GATED else 1
        rows = halves * intermediate
        self.codes13 = rng.integers(0, 16, (experts, rows, hidden)).astype(np.uint8)
        self.codes2 = rng.integers(0, 16, (experts, hidden, intermediate)).astype(np.uint8)
        self.scales13 = rng.integers(121, 127, (experts, rows, hidden // 32)).astype(np.uint8)
        self.scales2 = rng.integers(121, 127, (experts, hidden, intermediate // 32)).astype(np.uint8)
        self.b13 = rng.standard_normal((experts, rows)).astype(np.float16).astype(np.float32) if bias else None
        self.b2 = rng.standard_normal((experts, hidden)).astype(np.float16).astype(np.float32) if bias else None
        self.halves = halves
        self.alpha, self.beta, self.limit = (1.5, 2.0, np.inf) if name == "situ" else (1.702, 1.0, 7.0)
        self.pack()

    def pack(self):
        self.w13 = guarded(ref.pack_matrix(self.codes13, self.scales13, self.halves))
        self.w2 = guarded(ref.pack_matrix(self.codes2, self.scales2, 1))

    def biases(self, dtype):
        if self.b13 is None:
            return None, None
        convert = {F32: np.float32, F16: np.float16, F64: np.float64}
        parts = np.split(self.b13, self.halves, axis=1)
        b13 = np.concatenate([ref.pad(part, 1, ref.pad64(self.intermediate), 0) for part in parts], axis=1)
        b2 = ref.pad(self.b2, 1, ref.pad64(self.hidden), 0)
        return tuple(guarded(ref.bf16_bits(b) if dtype == BF16 else b.astype(convert[dtype])) for b in (b13, b2))

    def run(self, isa, x, ids, weights, dtype, threads=1, fill=255, bias_dtype=F32, on_input=False, invariant=False):
        b13, b2 = self.biases(bias_dtype)
        out = guarded(np.full(x.shape, 0xAAAA if dtype != F32 else -7, x.dtype))
        kernels.moe(isa=isa, threads=threads, fill=fill, x=guarded(x), dtype=dtype, topk_ids=guarded(ids),
                    topk_weights=guarded(weights), w13=self.w13, w13_bias=b13, w2=self.w2, w2_bias=b2,
                    bias_dtype=bias_dtype, intermediate=self.intermediate, activation=self.code, alpha=self.alpha,
                    beta=self.beta, limit=self.limit, weight_on_input=on_input, batch_invariant=invariant, out=out)  # fmt: skip
        return out

    def expected(self, x, ids, weights, dtype, on_input=False):
        w13, w2 = ref.dequant(self.codes13, self.scales13), ref.dequant(self.codes2, self.scales2)
        with np.errstate(invalid="ignore", over="ignore"):
            return ref.moe(x, ids, weights, w13, self.b13, w2, self.b2, self.name, self.alpha, self.beta, self.limit,
                           on_input, dtype != F32)  # fmt: skip


def encode(x: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == F32:
        return x.astype(np.float32)
    return ref.bf16_bits(x) if dtype == BF16 else x.astype(np.float16).view(np.uint16)


def decode(raw: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == F32:
        return raw
    return ref.bf16_values(raw) if dtype == BF16 else raw.view(np.float16).astype(np.float32)


def routing(rng, tokens, top_k, experts):
    ids = rng.integers(-1, experts, (tokens, top_k)).astype(np.int32)
    weights = rng.random((tokens, top_k)).astype(np.float32)
    weights[ids < 0] = np.nan  # a skipped slot contributes nothing whatever its weight is
    if tokens > 2:
        ids[2] = -1
    return ids, weights


TOLERANCE = {F32: 1e-5, BF16: 2.6e-3, F16: 2.0e-3}


def relative_error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


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
        part = layer.run(
            isa, raw[begin:end].copy(), ids[begin:end].copy(), weights[begin:end].copy(), dtype, invariant=True
        )
        assert np.array_equal(part, whole[begin:end])


@pytest.mark.parametrize("tokens", [1, 4, 40])
@every_isa
def test_moe_extreme_rows(isa, tokens):
    """Rows that kernels with a limited range would get wrong, next to normal ones, in x and in h."""
    rng = np.random.default_rng(15)
    layer = Layer("relu2_no_mul", 128, 64, 1, bias=False)
    ids, weights = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)
    for dtype, value, factor in itertools.product(
        (F32, BF16), (30000.0, 2.0**-130, 2.0**-20, 2.0**50), (1.0, 2.0**-50)
    ):
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


# ------------------------------------------------------------------------------------------------------ the selection


def chosen(isa: str | None) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "MXFP4_CPU_ISA"}
    if isa is not None:
        env["MXFP4_CPU_ISA"] = isa
    script = f"import sys; sys.path.insert(0, {os.path.dirname(kernels.__file__)!r}); import _kernels; print(_kernels.chosen())"
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)


def test_the_best_table_is_chosen():
    assert ISAS[0] == "scalar" and chosen(None).stdout.strip() == ISAS[-1]


@every_isa
def test_environment_lowers_the_isa(isa):
    assert chosen(isa).stdout.strip() == isa


def test_unavailable_isa_is_an_error():
    for wish in ("avx9", ""):
        result = chosen(wish)
        assert result.returncode != 0
        assert f"CPU instruction set '{wish}' is not available; this CPU has: {', '.join(ISAS)}" in result.stderr
