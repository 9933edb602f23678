"""Rows of x in integers: nothing is lost on the way, and products are held to float64 sums."""

import kernels_reference as ref
import mxfp4_ops._kernels as kernels  # an error, not a skip, when it was not built
import numpy as np
import pytest
from kernels_reference import EXTREME_SCALES, guarded


def random_tile(rng, k, low=118, high=136):
    codes = rng.integers(0, 16, (32, k)).astype(np.uint8)
    return codes, rng.integers(low, high, (32, k // 32)).astype(np.uint8)


def bf16(x: np.ndarray) -> np.ndarray:
    return ref.bf16_values(ref.bf16_bits(x))


def integer_rows() -> dict[str, np.ndarray]:
    """Rows of bf16 values that integers can hold, with few enough residuals."""
    rng = np.random.default_rng(17)
    normal = rng.standard_normal(1088)
    rows = {"normal": normal, "negative": -np.abs(normal), "equal": np.full(64, -3.0), "zero": np.zeros(128)}
    rows["heavy"] = normal * np.abs(rng.standard_normal(1088))
    rows["zero block"] = np.where(np.arange(1088) // 32 % 3 == 1, 0, normal)
    rows["minus zero"] = np.where(np.arange(1088) % 5 == 1, -0.0, normal)
    rows["one huge"], rows["one tiny"] = normal.copy(), normal.copy()
    rows["one huge"][::64] = 2.0**12
    rows["one tiny"][7::64] = [2.0**-133, -(2.0**-130), 2.0**-127, 2.0**-40] * 4 + [1e-38]
    rows["spread"] = np.where(np.arange(640) % 5 == 1, 2.0**-11 * 129 / 128, 1)
    rows["small"], rows["large"] = normal * 2.0**-95, normal * 2.0**97
    for exponent in range(-17, 1):  # at and around the ends of two and three planes
        for significand in (1.0, 255 / 128, 129 / 128):
            x = np.full(1024, 1.0)
            x[5::32] = significand * 2.0**exponent
            x[9::64] *= -1
            rows[f"border {exponent} {significand}"] = x
    for top in (255, 254, 128):  # the largest integers
        x = np.full(1024, top / 128)
        x[3::32] *= -1
        x[4::32] = 2.0**-9
        rows[f"top {top}"] = np.where(np.arange(1024) % 16 == 1, x, 0)
    return {name: bf16(x.astype(np.float32)) for name, x in rows.items()}


ISAS = kernels.isas()
INTEGER_ISAS = [isa for isa in ISAS if kernels.quantize_row(isa, np.zeros(64, np.float32)) is not None]
every_integer_isa = pytest.mark.parametrize("isa", INTEGER_ISAS)


def test_integer_isas():
    assert [isa for isa in ISAS if isa in ("scalar", "avx2", "avx512_vnni")] == INTEGER_ISAS


@every_integer_isa
def test_integers_lose_nothing(isa):
    seen = set()
    for name, x in integer_rows().items():
        planes, q, factors, residual_k, residuals = kernels.quantize_row(isa, guarded(x))
        assert planes in (2, 3), name
        seen.add((planes, len(residual_k) > 0))
        assert (np.abs(q) <= 256**planes // 2).all() and len(residual_k) <= len(x) // 16
        assert (q[residual_k] == 0).all() and (np.diff(residual_k) > 0).all()
        joined = q.astype(np.float64) * np.repeat(factors.astype(np.float64) * 2, 32)
        joined[residual_k] = residuals
        assert np.array_equal(joined, x), name
        for other in INTEGER_ISAS:
            for a, b in zip(kernels.quantize_row(other, x), (planes, q, factors, residual_k, residuals), strict=True):
                assert np.array_equal(a, b)
    assert seen == {(2, False), (2, True), (3, False), (3, True)}


@every_integer_isa
def test_rows_that_integers_cannot_hold(isa):
    rng = np.random.default_rng(18)
    ordinary = bf16(rng.standard_normal(640).astype(np.float32))
    for value in (np.inf, -np.inf, np.nan, 2.0**101, -3e38):
        x = ordinary.copy()
        x[637] = value
        assert kernels.quantize_row(isa, guarded(x))[0] == 0
    x = ordinary.copy()
    x[64:96] = 0
    x[70] = 2.0**-101  # alone in its block
    assert kernels.quantize_row(isa, guarded(x))[0] == 0
    spread = bf16(np.exp2(rng.uniform(-60, 20, 640)).astype(np.float32))
    assert kernels.quantize_row(isa, guarded(spread))[0] == 0
    mixed = np.where(rng.random(640) < 0.5, 2.0**-130, 1).astype(np.float32)
    assert kernels.quantize_row(isa, guarded(mixed))[0] == 0
    assert kernels.dot_int(isa, np.zeros(10880, np.uint8), [mixed]) is None


def check_dot_int(isa, codes, scales, x):
    got = kernels.dot_int(isa, guarded(ref.pack_tiles(codes, scales).reshape(-1)), [guarded(x)])[0, 0]
    weights = ref.dequant(codes, scales).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        want, size = weights @ x.astype(np.float64), np.abs(weights) @ np.abs(x.astype(np.float64))
        finite = np.isfinite(size) & (size < 3e38)
        assert not np.isfinite(got[~np.isfinite(size)]).any()
        tolerance = 2.0**-16 if isa == "scalar" else 2.0**-20  # one long sum
        assert (np.abs(got - want)[finite] <= tolerance * size[finite] + 1e-43).all()


@every_integer_isa
def test_dot_int(isa):
    rng = np.random.default_rng(19)
    for x in integer_rows().values():
        check_dot_int(isa, *random_tile(rng, len(x)), x)
    x = integer_rows()["one tiny"]
    codes, scales = random_tile(rng, len(x))
    for code in range(16):  # the largest sums, of all rows at once
        check_dot_int(isa, np.full_like(codes, code), scales, np.full(len(x), -255 / 128, np.float32))
        check_dot_int(isa, np.full_like(codes, code), scales, np.full(len(x), 254 / 128, np.float32))


@every_integer_isa
def test_dot_int_single_elements(isa):
    """Every code of every place lands in its own output, exactly, from the planes and from the residuals."""
    rng = np.random.default_rng(20)
    codes, scales = random_tile(rng, 64, 1, 250)
    tile, weights = ref.pack_tiles(codes, scales).reshape(-1), ref.dequant(codes, scales)
    for k in range(64):
        x = np.zeros(64, np.float32)
        x[k] = 129 / 128
        assert np.array_equal(kernels.dot_int(isa, tile, [x])[0, 0], weights[:, k] * x[k])
        x[k ^ 1] = 2.0**40
        codes_k = np.where(np.arange(64) == k ^ 1, 0, codes).astype(np.uint8)
        assert list(kernels.quantize_row(isa, x)[3]) == [k]
        got = kernels.dot_int(isa, ref.pack_tiles(codes_k, scales).reshape(-1), [x])[0, 0]
        assert np.array_equal(got, weights[:, k] * x[k])


@every_integer_isa
def test_dot_int_scales(isa):
    rng = np.random.default_rng(21)
    rows = integer_rows()
    for byte in (*EXTREME_SCALES, *range(120, 131)):
        for name in ("normal", "heavy", "one huge"):
            x = rows[name] * np.float32(2.0**-60 if byte > 200 else 1)
            codes, scales = random_tile(rng, len(x))
            scales[:, 3] = byte
            check_dot_int(isa, codes, scales, x)
            scales[:] = byte
            check_dot_int(isa, codes, scales, x)
            scales[5:] = 120
            check_dot_int(isa, codes, scales, x)
    for byte in (252, 0):  # factors of x and w of which only the product leaves fp32, and only where codes are not 0
        codes, scales = random_tile(rng, 1088)
        scales[:], codes[:] = byte, 0
        codes[4, 7] = 3
        for x in (rows["small"], rows["large"]):
            check_dot_int(isa, codes, scales, x)


@every_integer_isa
@pytest.mark.parametrize("name", ["normal", "heavy"])  # two and three planes
def test_dot_int_gives_the_same_bits_whatever_other_rows_and_tiles(isa, name):
    rng, x = np.random.default_rng(22), integer_rows()[name]
    rows = [guarded(x), *(guarded(rng.permutation(x.reshape(-1, 32)).reshape(-1)) for _ in range(13))]
    rows = [row * np.float32(2.0 ** (i % 5)) for i, row in enumerate(rows)]
    tiles = [ref.pack_tiles(*random_tile(rng, len(x), 0, 255)).reshape(-1) for _ in range(5)]
    alone = np.array([[kernels.dot_int(isa, guarded(tile), [row])[0, 0] for row in rows] for tile in tiles])
    assert np.isfinite(alone).any() and not np.isfinite(alone).all()
    for count in range(1, 6):
        for m in (1, 2, 14 - count) if count > 1 else range(1, 15):
            together = kernels.dot_int(isa, guarded(np.concatenate(tiles[:count])), rows[:m])
            assert np.array_equal(together, alone[:count, :m], equal_nan=True)


@every_integer_isa
def test_dot_int_scale_255_makes_nan(isa):
    scales = np.full((32, 2), 127, np.uint8)
    scales[9, 1] = 255
    tile = ref.pack_tiles(np.zeros((32, 64), np.uint8), scales).reshape(-1)
    got = kernels.dot_int(isa, tile, [np.ones(64, np.float32)])[0, 0]
    assert np.isnan(got[9]) and (np.delete(got, 9) == 0).all()
