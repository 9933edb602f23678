"""The quantizers of other libraries and the search for the least error, against numbers written by hand, against what
the libraries answered (tests/golden/quantizers.json), and against exact fractions."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from mxfp4_ops import QUANT_MODES, quant_modes
from mxfp4_ops.format import codes_of
from test_ops import opcheck, strided
from torch import Tensor

OPS = torch.ops.mxfp4
GOLDEN = json.loads((Path(__file__).parent / "golden" / "quantizers.json").read_text())
DOCS = (Path(__file__).resolve().parents[1] / "docs" / "format.md").read_text()
NATIVE = ("even", "floor", "ceil", "rceil")
OTHERS = [name for name in QUANT_MODES if name not in (*NATIVE, "mse")]
FRACTIONS = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
NAN, INF, LARGEST = math.nan, math.inf, torch.finfo(torch.float32).max

# Names of modes that answer alike in a corner.
TORCHAO = ("torchao_floor", "torchao_ceil", "torchao_even")
TRITON = ("triton_kernels", "triton_kernels_down", "triton_kernels_3_5", "triton_kernels_3_5_down")
QUARK = ("quark", "quark_triton")
BELOW = ("floor", "torchao_floor", "gguf", "triton_kernels_down", "triton_kernels_3_5_down")  # byte for amax = 7
CEIL = ("ceil", "torchao_ceil")
RCEIL = ("rceil", "torchao_rceil", "triton_kernels", "triton_kernels_3_5", "flashinfer", "modelopt")


def block(*values: float) -> Tensor:
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


def rows(names: tuple[str, ...], byte: int, codes: str) -> dict[str, tuple[int, str]]:
    return dict.fromkeys(names, (byte, codes))


def answer(x: Tensor, mode: str, count: int) -> tuple[int, str]:
    """Scale byte and the first codes, one hexadecimal digit each."""
    blocks, scales = OPS.quant(x, scale_rule=mode)
    return int(scales), "".join(f"{c:x}" for c in codes_of(blocks)[:count].tolist())


T = 2.0**-126  # the least normal float32
ALL = tuple(QUANT_MODES)
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
AWAY = ("quark_triton", "triton_kernels_3_5", "triton_kernels_3_5_down")
# What each mode answers: (block, codes that are looked at, answers), later rows before earlier ones. Worked by hand.
CORNERS: dict[str, tuple[Tensor, dict[str, tuple[int, str]]]] = {
    "ties": (
        block(*TIES, 6.0, *(-v for v in TIES)),
        rows(ALL, 127, "022446678aaccee") | rows(CEIL, 128, "01122445899aacc") | rows(AWAY, 127, "123456779abcdef")
        | rows(("modelopt",), 127, "0123456789abcde") | rows(("gguf",), 127, "0123456709abcde"),
    ),
    "zero of both signs": (
        block(0.0, -0.0),
        rows(ALL, 0, "080") | rows(("compressed_tensors", "gguf"), 0, "000") | rows(("modelopt",), 0, "888"),
    ),
    "signs beside 6": (  # -0.1 rounds to zero
        block(6.0, -0.0, 0.0, -0.1, 0.1),
        rows(ALL, 127, "78080") | rows(CEIL, 128, "58080") | rows(("compressed_tensors",), 127, "70080")
        | rows(("gguf",), 127, "70000") | rows(("modelopt",), 127, "78880"),
    ),
    "7": (block(7.0), rows(ALL, 128, "6") | rows(BELOW, 127, "7") | rows(("modelopt",), 128, "5")),
    "6.5": (block(6.5), rows(ALL, 127, "7") | rows((*CEIL, *RCEIL, "mse"), 128, "5")),
    "5: below 1.5 * 2^2": (
        block(5.0, 2.0),
        rows(ALL, 127, "64") | rows(CEIL, 128, "42") | rows(AWAY, 127, "74")
        | rows(("triton_kernels_3_5_down",), 126, "76"),
    ),
    "2^-126, and 2^-149 beside it": (
        block(T, -T, T / 2, -T / 4, 2.0**-149),
        rows(ALL, 0, "4c290") | rows(TORCHAO, 0, "2a180") | rows(("torchao_rceil", "flashinfer"), 0, "08080")
        | rows(TRITON, 0, "08080") | rows(("triton_kernels",), 1, "2a180") | rows(("triton_kernels_3_5",), 1, "2a190"),
    ),
    "3 * 2^-126": (  # 1.5 * 2^-125, which 6 * 2^-127 holds
        block(3 * T, -T),
        rows(ALL, 0, "7c") | rows(TORCHAO, 0, "5a") | rows(CEIL, 1, "5a")
        | rows(("torchao_rceil", "flashinfer", *TRITON), 0, "08")
        | rows(("triton_kernels", "triton_kernels_3_5"), 1, "5a"),
    ),
    "a quarter that rounds up to 2^-126": (
        block(2.0**-124 * (1 - 2.0**-24)),
        rows(ALL, 1, "6") | rows(("floor",), 0, "7") | rows(("torchao_floor",), 0, "6")
        | rows(("triton_kernels_3_5_down",), 0, "0"),
    ),
    "the largest float32": (
        block(LARGEST, -1e38),
        rows(ALL, 253, "6a") | rows(("floor", *BELOW), 252, "7c") | rows(QUARK, 254, "49") | rows(("gguf",), 253, "5a"),
    ),
    "log2(amax) that rounds up to 100": (
        block(2.0**100 * (1 - 20 * 2.0**-24)), rows(ALL, 225, "6") | rows(BELOW, 224, "7") | rows(("gguf",), 225, "6"),
    ),
    "log2(amax / 6) that rounds down to 100": (
        block(6 * 2.0**100 * (1 + 8 * 2.0**-24)),
        rows(ALL, 227, "7") | rows((*CEIL, *RCEIL, "mse"), 228, "5") | rows(("torchao_rceil", "modelopt"), 227, "7"),
    ),
    "NaN": (
        block(NAN, 1.0, -3.0, -0.0, 0.3),
        rows(ALL, 255, "00000") | rows(TORCHAO, 255, "30880") | rows(("torchao_rceil",), 255, "33333")
        | rows((*QUARK, *TRITON, "flashinfer"), 126, "74f81") | rows(("gguf",), 0, "00000"),
    ),
    "nothing but NaN": (
        torch.full((32,), NAN),
        rows(ALL, 255, "00") | rows((*TORCHAO, "torchao_rceil"), 255, "33") | rows(QUARK, 254, "77")
        | rows(TRITON, 255, "77") | rows(("triton_kernels", "triton_kernels_3_5"), 0, "77")
        | rows(("flashinfer",), 255, "77") | rows(("gguf",), 0, "00"),
    ),
    "Inf": (
        block(INF, 1.0, -3.0, -0.0, 3e38),
        rows(ALL, 255, "00000") | rows(TORCHAO, 253, "70886") | rows(("torchao_rceil", "flashinfer"), 254, "70884")
        | rows(QUARK, 254, "70884") | rows(TRITON, 255, "70880"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", QUANT_MODES)
@pytest.mark.parametrize("corner", CORNERS)
def test_corners_by_hand(corner: str, mode: str, device: str) -> None:
    x, answers = CORNERS[corner]
    assert answer(x.to(device), mode, len(answers[mode][1])) == answers[mode]


def golden_inputs() -> Tensor:
    return torch.tensor([[int(row[i : i + 8], 16) for i in range(0, 256, 8)] for row in GOLDEN["inputs"]]).to(
        torch.int32
    ).view(torch.float32)  # fmt: skip


@pytest.mark.parametrize("mode", OTHERS)
def test_golden_answers_of_the_library(mode: str, device: str) -> None:
    """What the library itself answered, or its formula in fractions; null where its answer is undefined."""
    x, wanted = golden_inputs(), GOLDEN["modes"][mode]
    blocks, scales = OPS.quant(x.to(device), scale_rule=mode)
    codes, scales = codes_of(blocks).cpu(), scales[:, 0].cpu()
    nan = x.isnan() | (x.isinf() & (scales == 255)[:, None])  # IEEE 754 leaves the sign of such a NaN open
    found = ["".join(f"{c:x}" for c in row) for row in torch.where(nan, codes & 7, codes).tolist()]
    compared = 0
    for row, byte, codes_wanted, byte_wanted in zip(
        found, scales.tolist(), wanted["codes"], wanted["scales"], strict=True
    ):
        if codes_wanted is not None:
            assert (byte, row) == (byte_wanted, codes_wanted)
            compared += 1
    assert compared > 25, wanted["library"]


def test_every_mode_of_the_table_is_tested_and_differs_from_the_others() -> None:
    """A mode that answered like one of the compiled four everywhere would be run by them."""
    assert set(GOLDEN["modes"]) == set(OTHERS)
    assert [m.native for m in QUANT_MODES.values()] == [0, 1, 2, 3] + [None] * (len(QUANT_MODES) - 4)
    seen = {}
    for mode in (*NATIVE, *OTHERS):
        blocks, scales = quant_modes.quant(golden_inputs(), mode)
        key = torch.cat([blocks, scales], 1).numpy().tobytes()
        assert key not in seen, f"{mode} and {seen[key]} never differ"
        seen[key] = mode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", QUANT_MODES)
def test_n5_qdq_is_dequant_of_quant_in_every_mode(mode: str, dtype: torch.dtype, device: str) -> None:
    x = golden_inputs().to(device, dtype)
    blocks, scales = OPS.quant(x, scale_rule=mode)
    wanted = OPS.dequant(blocks, scales, dtype=dtype)
    as_int = torch.int32 if dtype is torch.float32 else torch.int16
    for values in (x, strided(x), x.t().contiguous().t()):
        found = OPS.qdq(values, scale_rule=mode)
        assert found.dtype is dtype and torch.equal(found.isnan(), wanted.isnan())
        numbers = ~wanted.isnan()
        assert torch.equal(found.view(as_int)[numbers], wanted.view(as_int)[numbers])
        again = OPS.quant(values, scale_rule=mode)
        assert torch.equal(again[0], blocks) and torch.equal(again[1], scales)


@pytest.mark.parametrize("mode", ["mse", "torchao_rceil", "gguf", "triton_kernels"])
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (5, 96), (2, 3, 64)])
def test_c1_opcheck_quant_modes(mode: str, shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, device=device)
    opcheck(OPS.quant, (x,), {"scale_rule": mode})
    opcheck(OPS.qdq, (strided(x.bfloat16()),), {"scale_rule": mode})


@pytest.mark.parametrize("mode", [*OTHERS, "mse"])
def test_compiled_is_eager(mode: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 64)
    compiled = torch.compile(lambda v: OPS.quant(v, scale_rule=mode), fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(x), OPS.quant(x, scale_rule=mode), strict=True):
        assert torch.equal(found, wanted)


def error_by_hand(x: list[float], byte: int) -> Fraction:
    """The exact squared error of a block at a scale byte: each element at the nearest value."""
    unit = Fraction(2) ** (byte - 127)
    return sum((min(abs(abs(Fraction(v)) - f * unit) for f in FRACTIONS) ** 2 for v in x), Fraction(0))


def mse_blocks() -> Tensor:
    g = torch.Generator().manual_seed(21)
    x = torch.randn(60, 32, generator=g) * torch.randn(60, 1, generator=g).exp()
    heavy = torch.randn(20, 32, generator=g) / torch.rand(20, 32, generator=g).clamp_min(1e-3)
    flat = torch.full((8, 32), 0.26) * torch.rand(8, 32, generator=g)
    flat[:, 0] = torch.linspace(3.0, 6.2, 8)  # one large element beside small ones: the lower scale is often better
    rounded = torch.round(torch.randn(10, 32, generator=g) * 8) / 4
    tiny = torch.randn(6, 32, generator=g) * torch.tensor([[2.0**e] for e in (-149, -140, -127, -126, -125, -124)])
    ties = torch.stack([block(6.5), block(7.0)])  # both bytes err by 0.5, by 1
    return torch.cat([x, heavy, flat, rounded, ties, tiny, torch.full((1, 32), LARGEST)])


def test_mse_is_the_least_error_of_all_scale_bytes() -> None:
    """Against every byte near the maximum, by fractions; of equal errors the byte that saturates nothing."""
    x = mse_blocks()
    blocks, scales = OPS.quant(x, scale_rule="mse")
    rceil = OPS.quant(x, scale_rule="rceil")[1]
    chosen = []
    for row, byte, least in zip(x.tolist(), scales[:, 0].tolist(), rceil[:, 0].tolist(), strict=True):
        errors = {b: error_by_hand(row, b) for b in range(max(least - 7, 0), min(least + 5, 254))}
        best = min(errors.values())
        assert byte == max(b for b, e in errors.items() if e == best and b <= least)
        chosen.append(byte - least)
    assert set(chosen) == {0, -1}, "both candidates are needed"
    out = OPS.dequant(blocks, scales, dtype=torch.float32)
    for row, back, byte in zip(x.tolist(), out.tolist(), scales[:, 0].tolist(), strict=True):
        error = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(row, back, strict=True) if math.isfinite(b))
        assert error == error_by_hand(row, byte) or not all(map(math.isfinite, back))


def test_mse_is_never_worse_than_another_rule() -> None:
    x = mse_blocks()[:90]
    exact = {}
    for mode in QUANT_MODES:
        out = OPS.qdq(x, scale_rule=mode)
        exact[mode] = [
            sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(row, back, strict=True))
            for row, back in zip(x.tolist(), out.tolist(), strict=True)
        ]
    for mode, errors in exact.items():
        assert all(best <= other for best, other in zip(exact["mse"], errors, strict=True)), mode
    assert sum(exact["mse"]) < sum(exact["even"]) and sum(exact["mse"]) < sum(exact["rceil"])


def test_mse_gives_mxfp4_values_back() -> None:
    g = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (400, 16), dtype=torch.uint8, generator=g)
    scales = torch.randint(0, 253, (400, 1), dtype=torch.uint8, generator=g)
    x = OPS.dequant(blocks, scales, dtype=torch.float32)
    assert torch.equal(OPS.qdq(x, scale_rule="mse").view(torch.int32), x.view(torch.int32))


def test_an_unknown_rule_is_refused_with_all_names() -> None:
    names = ", ".join(QUANT_MODES)
    assert names.startswith("even, floor, ceil, rceil, mse, quark, ") and names.endswith(", gguf, modelopt")
    for op in (OPS.quant, OPS.qdq):
        with pytest.raises(ValueError, match=f"scale_rule must be one of {names}, got 'nearest'."):
            op(torch.zeros(32), scale_rule="nearest")


def row_of(name: str) -> str:
    """A mode as docs/format.md shows it."""
    m = QUANT_MODES[name]
    byte0, byte255 = (f"2^{math.frexp(v)[1] - 1}" if v > 1 else f"{v:g}" for v in (m.byte0, m.byte255))
    met = "" if m.inf == m.nan == "block" else f"{byte255}"
    cells = (
        f"`{name}`",
        f"`{m.byte}`",
        m.ties,
        m.sign,
        byte0,
        met,
        m.inf,
        m.nan,
        str(m.nan_code) if met else "",
        m.source,
    )
    return "| " + " | ".join(cells) + " |"


def test_the_documented_table_is_the_table() -> None:
    lines = DOCS.splitlines()
    for name in OTHERS:
        assert row_of(name) in lines, row_of(name)
        note = QUANT_MODES[name].note
        assert not note or f"`{name}`" in next(line for line in lines if line.startswith("- ") and note in line)


def test_documented_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.findall(r"```python\n(.*?)```", DOCS, flags=re.S)
    assert found
    for code in found:
        exec(compile(code, "format.md", "exec"), {})
    assert capsys.readouterr().out == "".join(re.findall(r"```text\n(.*?)```", DOCS, flags=re.S))
