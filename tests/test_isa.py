"""Every kernel of every instruction set of this machine, called one by one without torch.

Conversions and the number format are exact; products are held to float64 sums. Inputs lie directly before a page that
cannot be read, so that reading past an end is a crash. The whole layer is tested in test_isa_moe.py.
"""

import itertools
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import kernels_reference as ref
import mxfp4_ops._kernels as kernels  # an error, not a skip, when it was not built
import numpy as np
import pytest
from kernels_reference import BF16, EXTREME_SCALES, F16, F64, guarded

ISAS = kernels.isas()
RULES = range(4)  # even, floor, ceil, rceil
ROW_COUNTS = [*range(1, 13), 17, 49, 96, 192]

every_isa = pytest.mark.parametrize("isa", ISAS)


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
    cases = [(1, 0), (0, 0), (np.inf, 0), (np.nan, 0), (2.0**100, 0), (2.0**101, 2), (-3e38, 2), (tiny, 0)]
    cases += [(2.0**-101, 1), (-1e-45, 1)]
    for n in (1, 7, 32, 45):
        for value, flags in cases:
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


# ------------------------------------------------------------------------------------------------------ the selection


def chosen(isa: str | None) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "MXFP4_CPU_ISA"}
    if isa is not None:
        env["MXFP4_CPU_ISA"] = isa
    folder = os.path.dirname(kernels.__file__)  # not through the package, which would need torch
    script = f"import sys; sys.path.insert(0, {folder!r}); import _kernels; print(_kernels.chosen())"
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)


def test_the_best_table_is_chosen():
    """The last one, but for bf16 dot products, which are slower than fp32 FMA on Intel and faster on AMD."""
    cpuinfo = Path("/proc/cpuinfo")
    amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()
    wanted = [isa for isa in ISAS if amd or isa != "avx512_bf16"]
    assert ISAS[0] == "scalar" and chosen(None).stdout.strip() == wanted[-1]


@every_isa
def test_environment_lowers_the_isa(isa):
    assert chosen(isa).stdout.strip() == isa


def test_unavailable_isa_is_an_error():
    for wish in ("avx9", ""):
        result = chosen(wish)
        assert result.returncode != 0
        assert f"CPU instruction set '{wish}' is not available; this CPU has: {', '.join(ISAS)}" in result.stderr
