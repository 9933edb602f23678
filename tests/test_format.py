"""The number format against exact arithmetic: fractions and integers, never the package's own tables."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from mxfp4_ops import format as fmt
from torch import Tensor

OPS = torch.ops.mxfp4
MAGNITUDES = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
RULES = ("even", "floor", "ceil", "rceil")
# The op runs the compiled kernel where there is one; the plain-torch definition is held to the same numbers.
DEQUANT = {"op": lambda b, s, d: OPS.dequant(b, s, dtype=d), "definition": fmt.dequant}
QUANT = {"op": lambda x, r: OPS.quant(x, scale_rule=r), "definition": fmt.quant}


def all_pairs() -> tuple[Tensor, Tensor]:
    """Every scale byte with every code: row b holds the 16 codes twice, at scale byte b."""
    row = torch.tensor([2 * i | (2 * i + 1) << 4 for i in range(8)] * 2, dtype=torch.uint8)
    return row.repeat(256, 1), torch.arange(256, dtype=torch.uint8)[:, None]


def exact(code: int, byte: int) -> Fraction:
    return MAGNITUDES[code & 7] * (-1 if code & 8 else 1) * Fraction(2) ** (byte - 127)


def nearest(value: Fraction, bits: int, emin: int, emax: int) -> float:
    """Round to a binary float with ``bits`` of mantissa, ties to even, subnormals kept, overflow to inf."""
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = emin
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - bits)
    rounded = round(size / step) * step  # Python rounds halves to even
    if rounded >= Fraction(2) ** (emax + 1):
        return math.copysign(math.inf, value)
    return math.copysign(float(rounded), value)


@pytest.mark.parametrize("which", DEQUANT)
@pytest.mark.parametrize(
    ("dtype", "bits", "emin", "emax"),
    [(torch.float32, 23, -126, 127), (torch.bfloat16, 7, -126, 127), (torch.float16, 10, -14, 15)],
)
def test_n2_n3_all_codes_times_all_scale_bytes(which: str, dtype: torch.dtype, bits: int, emin: int, emax: int) -> None:
    out = DEQUANT[which](*all_pairs(), dtype).double()
    for byte in range(255):
        wanted = [nearest(exact(code, byte), bits, emin, emax) for code in range(16)] * 2
        assert out[byte].tolist() == wanted, byte
        if dtype is not torch.float16:  # nothing was rounded: the value, or inf where the type ends
            held = [float(exact(code, byte)) for code in range(16)]
            assert all(w == h or math.isinf(w) for w, h in zip(wanted, held, strict=False))
    assert torch.isnan(out[255]).all()


@pytest.mark.parametrize("which", DEQUANT)
def test_the_sign_of_zero_is_kept(which: str) -> None:
    out = DEQUANT[which](
        torch.tensor([[0x80] * 16], dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8), torch.float32
    )
    assert torch.signbit(out)[0].tolist() == [False, True] * 16


def bits_of(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def scale_by_hand(amax: float, rule: str) -> int:
    """The rules of docs/format.md by exact comparison of fractions with powers of two."""
    if amax == 0:
        return 0
    value = Fraction(amax)
    floor = -200
    while Fraction(2) ** (floor + 1) <= value:
        floor += 1
    ratio = value / Fraction(2) ** floor  # in [1, 2)
    up = {"floor": False, "ceil": ratio > 1, "even": ratio >= Fraction(7, 4), "rceil": ratio > Fraction(3, 2)}[rule]
    return max(floor - 2 + up + 127, 0)


def code_by_hand(x: float, byte: int) -> int:
    """Nearest magnitude; of two at the same distance the one with the even code."""
    size = abs(Fraction(x)) / Fraction(2) ** (byte - 127)
    best = min(range(8), key=lambda c: (abs(MAGNITUDES[c] - size), c % 2))
    return best | (8 if math.copysign(1.0, x) < 0 else 0)


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


@pytest.mark.parametrize("which", QUANT)
@pytest.mark.parametrize("rule", RULES)
def test_n5_quant_against_fractions(which: str, rule: str) -> None:
    x = tricky_blocks()
    blocks, scales = QUANT[which](x, rule)
    for row, packed, byte in zip(x.tolist(), blocks.tolist(), scales[:, 0].tolist(), strict=True):
        wanted = scale_by_hand(max(map(abs, row)), rule)
        assert byte == wanted, row
        codes = [c for pair in packed for c in (pair & 15, pair >> 4)]
        assert codes == [code_by_hand(v, byte) for v in row], row


@pytest.mark.parametrize("which", QUANT)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_n7_nan_and_inf_show_in_their_block_only(which: str, rule: str, bad: float) -> None:
    x = torch.ones(3, 96)
    x[1, 40] = bad
    blocks, scales = QUANT[which](x, rule)
    assert scales[1, 1] == 255 and (blocks[1, 16:32] == 0).all()
    out = OPS.dequant(blocks, scales, dtype=torch.float32)
    assert torch.isnan(out[1, 32:64]).all()
    assert torch.equal(torch.isnan(out).sum(), torch.tensor(32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_n5_qdq_is_dequant_of_quant(dtype: torch.dtype, rule: str) -> None:
    x = tricky_blocks().to(dtype)
    x = torch.where(torch.isfinite(x), x, 0)
    blocks, scales = OPS.quant(x, scale_rule=rule)
    assert torch.equal(OPS.qdq(x, scale_rule=rule), OPS.dequant(blocks, scales, dtype=dtype))
    definition = fmt.quant(x, rule)
    assert torch.equal(blocks, definition[0]) and torch.equal(scales, definition[1])
    assert OPS.qdq(x, scale_rule=rule).dtype is dtype


def test_n6_the_block_maximum_is_never_narrowed() -> None:
    """6.98 is below 7 = 1.75 * 4 in float32 and rounds to 7 in bfloat16: rule N6 says 127, not 128."""
    assert OPS.quant(torch.tensor([6.98] + [0.0] * 31))[1].tolist() == [127]


def test_large_and_odd_counts_of_blocks() -> None:
    """Kernels that take several blocks a step meet every remainder."""
    g = torch.Generator().manual_seed(5)
    for blocks in (1, 2, 3, 5, 17, 1031):
        x = torch.randn(blocks * 32, generator=g) * torch.randn(blocks, generator=g).exp().repeat_interleave(32)
        found, wanted = OPS.quant(x), fmt.quant(x, "even")
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(OPS.dequant(*found, dtype=dtype), fmt.dequant(*found, dtype))


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
