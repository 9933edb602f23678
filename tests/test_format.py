"""The number format against exact arithmetic: fractions and integers, never the package's own tables."""

from __future__ import annotations

import math
from fractions import Fraction

import exact
import numpy as np
import pytest
import torch
from exact import FORMATS, INTEGERS, RULES
from mxfp4_ops import format as fmt
from mxfp4_ops import quant_modes
from torch import Tensor

OPS = torch.ops.mxfp4
# The op runs the compiled kernel where there is one; the plain-torch definition is held to the same numbers.
DEQUANT = {"op": lambda b, s, d: OPS.dequant(b, s, dtype=d), "definition": fmt.dequant}
QUANT = {"op": lambda x, r: OPS.quant(x, scale_rule=r), "definition": fmt.quant}

every_rule = pytest.mark.parametrize("rule", RULES)
every_quant = pytest.mark.parametrize("which", QUANT)
every_dequant = pytest.mark.parametrize("which", DEQUANT)
every_dtype = pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: str(d)[6:])


def bits(x: Tensor) -> Tensor:
    """The bits of floats, as unsigned numbers: unlike values they tell 0 from -0."""
    wide = x.view(INTEGERS[x.dtype]).to(torch.int64)
    return wide & (0xFFFFFFFF if x.dtype is torch.float32 else 0xFFFF)


def assert_quant(x: Tensor, rule: str) -> None:
    """Op and definition on x [n, 32], held to integer arithmetic on the same numbers in float32, which is exact."""
    codes, bytes_ = exact.quant_array(x.to(torch.float32).numpy(), rule)
    for which, quant in QUANT.items():
        blocks, scales = quant(x, rule)
        assert np.array_equal(scales[:, 0].numpy(), bytes_), which
        assert np.array_equal(blocks.numpy(), exact.pack(codes)), which


@every_dequant
@every_dtype
def test_n2_n3_all_codes_times_all_scale_bytes(which: str, dtype: torch.dtype) -> None:
    """Bit for bit: row b holds the 16 codes twice, at scale byte b."""
    row = torch.tensor([2 * i | (2 * i + 1) << 4 for i in range(8)] * 2, dtype=torch.uint8)
    out = DEQUANT[which](row.repeat(256, 1), torch.arange(256, dtype=torch.uint8)[:, None], dtype)
    found = bits(out)
    for byte in range(255):
        wanted = [exact.encode(abs(exact.value(code, byte)), code >= 8, dtype) for code in range(16)] * 2
        assert found[byte].tolist() == wanted, byte
        for code, pattern in enumerate(wanted[:16]):
            if dtype is not torch.float16 and abs(exact.value(code, byte)) < 2**128:  # nothing was rounded
                assert exact.decode(pattern, dtype) == exact.value(code, byte)
    assert torch.isnan(out[255]).all()


def test_the_arithmetic_of_these_tests() -> None:
    """Numbers from the text of IEEE 754 and OCP MX v1.0, worked by hand; then the two forms against each other."""
    assert [exact.magnitude(c) for c in range(8)] == [0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6]
    half = torch.float16
    assert exact.encode(Fraction(65519), False, half) == 0x7BFF and exact.encode(Fraction(65520), False, half) == 0x7C00
    assert exact.encode(Fraction(2) ** -25, True, half) == 0x8000  # a tie with zero, which is even
    assert exact.encode(Fraction(3, 2) * Fraction(2) ** -24, False, half) == 2
    assert exact.encode(Fraction(2) ** -127, False, torch.bfloat16) == 0x0040
    assert exact.encode(Fraction(1, 3), False, torch.float32) == 0x3EAAAAAB
    assert exact.decode(0xBEAAAAAB, torch.float32) == -Fraction(11184811, 2**25)
    x = tricky_blocks().numpy()
    for rule in RULES:
        codes, scales = exact.quant_array(x, rule)
        for i, row in enumerate(x.tolist()):
            assert exact.quant_block(row, rule) == (codes[i].tolist(), int(scales[i])), (rule, row)


def tricky_blocks() -> Tensor:
    """Ties, neighbours of ties, powers of two and their neighbours, subnormals, the largest floats, zeros of both
    signs."""
    g = torch.Generator().manual_seed(3)
    edges = torch.tensor([0.25, 0.75, 1.25, 1.5, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1.0, 4.0, 8.0, 6.9375])
    near = torch.cat([edges, torch.nextafter(edges, edges * 2), torch.nextafter(edges, edges * 0)])
    rows = [near[torch.randint(len(near), (32,), generator=g)] * 2.0**e for e in (-126, -125, -60, 0, 1, 60, 124)]
    rows += [torch.randn(32, generator=g) * 2.0**e for e in (-149, -140, -127, -126, -100, 0, 100, 124)]
    rows += [torch.full((32,), 2.0**e) for e in (-149, -128, -127, -126, -125, 127)]
    rows += [torch.full((32,), v) for v in near.tolist()]  # each is the largest of a block: the bounds of scale rules
    rows += [torch.full((32,), torch.finfo(torch.float32).max), torch.zeros(32), -torch.zeros(32)]
    rows = torch.stack(rows)
    return torch.cat([rows, -rows, rows * torch.where(torch.arange(32) % 2 == 0, 1.0, -1.0)])


@every_rule
def test_n5_quant_against_integers(rule: str) -> None:
    assert_quant(tricky_blocks(), rule)
    for dtype in (torch.bfloat16, torch.float16):
        x = tricky_blocks().to(dtype)
        assert_quant(x[torch.isfinite(x).all(-1)], rule)


@every_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_every_16_bit_pattern_as_block_maximum(rule: str, dtype: torch.dtype) -> None:
    """All 65536 patterns, NaN and Inf among them; beside each a smaller magnitude, to be rounded at its scale."""
    g = torch.Generator().manual_seed(7)
    largest = torch.arange(65536)
    smaller = (torch.rand(65536, generator=g) * ((largest & 0x7FFF) + 1)).to(torch.int64)
    smaller |= torch.randint(2, (65536,), generator=g) << 15
    # Random patterns below the largest are mostly tiny; one of the same exponent or the one below meets the ties.
    near = torch.minimum((largest - torch.randint(512, (65536,), generator=g)) & 0x7FFF, largest & 0x7FFF)
    x = torch.zeros(65536, 32, dtype=dtype)
    for place, pattern in ((0, smaller), (13, largest), (31, near)):
        x[:, place] = pattern.to(torch.int16).view(dtype)
    assert_quant(x, rule)


@every_quant
def test_every_bfloat16_magnitude_at_one_scale_by_fractions(which: str) -> None:
    """Below 8, both signs, at scale 1: rule floor and a neighbour just below 8 hold it there, saturation included."""
    patterns = torch.arange(0x4100).to(torch.int16)  # 0x4100 is 8
    x = torch.full((len(patterns), 32), 7.96875, dtype=torch.bfloat16)
    x[:, 5] = patterns.view(torch.bfloat16)
    x[:, 6] = -x[:, 5]
    blocks, scales = QUANT[which](x, "floor")
    assert (scales == 127).all()
    for pattern, low, high in zip(patterns.tolist(), (blocks[:, 2] >> 4).tolist(), blocks[:, 3].tolist(), strict=True):
        wanted = exact.code(exact.decode(pattern, torch.bfloat16), False, 127)
        assert (low, high & 15) == (wanted, wanted | 8), hex(pattern)


@every_rule
def test_the_neighbours_of_every_threshold(rule: str) -> None:
    """In float32, at every exponent: 1, 1.25, 1.5 and 1.75 times a power of two, one ulp below and above."""
    exponent = torch.arange(255)[:, None] << 23
    near = torch.cat([torch.tensor([0, 0x200000, 0x400000, 0x600000]) + d for d in (-1, 0, 1)])
    pattern = (exponent + near).clamp_min(0).clamp_max(0x7F7FFFFF).flatten().to(torch.int32)
    x = torch.zeros(len(pattern), 32)
    x[:, 17] = pattern.view(torch.float32)
    x[:, 18] = -x[:, 17] * 0.375  # exact or rounded, it is an element like another
    assert_quant(x, rule)


@every_quant
@every_rule
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_n7_nan_and_inf_show_in_their_block_only(which: str, rule: str, bad: float) -> None:
    """A neighbour block of ones is 4 * 2^-2: byte 125, code 6."""
    x = torch.ones(3, 96)
    x[1, 40] = bad
    blocks, scales = QUANT[which](x, rule)
    wanted = torch.full((3, 48), 0x66, dtype=torch.uint8), torch.full((3, 3), 125, dtype=torch.uint8)
    wanted[0][1, 16:32], wanted[1][1, 1] = 0, 255
    assert torch.equal(blocks, wanted[0]) and torch.equal(scales, wanted[1])
    out = OPS.dequant(blocks, scales, dtype=torch.float32)
    assert torch.isnan(out[1, 32:64]).all() and (out.isnan() | (out == 1)).all() and out.isnan().sum() == 32


@every_dtype
@every_rule
def test_n5_qdq_is_dequant_of_quant(dtype: torch.dtype, rule: str) -> None:
    x = tricky_blocks().to(dtype)
    x = torch.where(torch.isfinite(x), x, 0)
    blocks, scales = OPS.quant(x, scale_rule=rule)
    wanted = bits(OPS.dequant(blocks, scales, dtype=dtype))
    assert OPS.qdq(x, scale_rule=rule).dtype is dtype
    assert torch.equal(bits(OPS.qdq(x, scale_rule=rule)), wanted)
    assert torch.equal(bits(quant_modes.qdq(x, rule)), wanted)


def test_n6_the_block_maximum_is_never_narrowed() -> None:
    """6.98 is below 7 = 1.75 * 4 in float32 and rounds to 7 in bfloat16: rule N6 says 127, not 128."""
    assert OPS.quant(torch.tensor([6.98] + [0.0] * 31))[1].tolist() == [127]


def test_large_and_odd_counts_of_blocks() -> None:
    """Kernels that take several blocks a step meet every remainder."""
    g = torch.Generator().manual_seed(5)
    for blocks in (1, 2, 3, 5, 17, 1031):
        x = torch.randn(blocks * 32, generator=g) * torch.randn(blocks, generator=g).exp().repeat_interleave(32)
        found = OPS.quant(x)
        codes, scales = exact.quant_array(x.view(-1, 32).numpy(), "even")
        assert np.array_equal(found[0].view(-1, 16).numpy(), exact.pack(codes))
        assert np.array_equal(found[1].numpy(), scales)
        pairs = list(zip(codes.reshape(-1).tolist(), np.repeat(scales, 32).tolist(), strict=True))[-4096:]
        for dtype in FORMATS:
            wanted = [exact.encode(abs(exact.value(c, b)), c >= 8, dtype) for c, b in pairs]
            assert bits(OPS.dequant(*found, dtype=dtype))[-4096:].tolist() == wanted


def test_n4_y1_same_bytes_in_other_dtypes() -> None:
    blocks, scales = OPS.quant(torch.randn(3, 4, 64))
    assert blocks.shape == (3, 4, 32) and scales.shape == (3, 4, 2)
    plain = OPS.dequant(blocks, scales)
    assert plain.dtype is torch.bfloat16
    assert torch.equal(plain, OPS.dequant(blocks.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)))
    for wrong in (torch.float32, torch.bfloat16, torch.int32, torch.int8):
        with pytest.raises(TypeError, match=rf"scales must be uint8 or float8_e8m0fnu, got {str(wrong)[6:]}"):
            OPS.dequant(blocks, scales.to(wrong))
        with pytest.raises(TypeError, match=rf"blocks must be uint8 or float4_e2m1fn_x2, got {str(wrong)[6:]}"):
            OPS.dequant(blocks.to(wrong), scales)
