"""The hand-worked vectors of tests/golden against fractions; then every implementation against them, bit for bit."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import exact
import mxfp4_ops._kernels as kernels
import numpy as np
import pytest
import torch
from mxfp4_ops import format as fmt
from mxfp4_ops import quant_modes
from torch import Tensor

Vector = dict[str, Any]
FILE = Path(__file__).with_name("golden") / "mxfp4_vectors.json"
VECTORS: list[Vector] = json.loads(FILE.read_text())["vectors"]
DTYPES = {str(dtype)[6:]: dtype for dtype in exact.FORMATS}
RULE_CODES = {"even": 0, "floor": 1, "ceil": 2, "rceil": 3}
DTYPE_CODES = {"bfloat16": 1, "float16": 2}


def number(text: str) -> Fraction:
    """A finite number as the file writes it."""
    return Fraction(float.fromhex(text)) if "x" in text else Fraction(text)


def as_float(text: str) -> float:
    return float(text) if text.lstrip("-") in ("nan", "inf", "0") else float(number(text))


def floats(texts: list[str], dtype: torch.dtype, shape: list[int]) -> Tensor:
    """A tensor of numbers that the dtype holds exactly."""
    wide = torch.tensor([as_float(t) for t in texts], dtype=torch.float64)
    narrow = wide.to(dtype)
    assert torch.equal(narrow.double().nan_to_num(nan=0.5), wide.nan_to_num(nan=0.5)), "the dtype does not hold these"
    return narrow.view(shape)


def packed(text: str, shape: list[int], elements: int) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).view(*shape[:-1], shape[-1] // elements)


def every(kind: str) -> Any:
    return pytest.mark.parametrize("vector", [pytest.param(v, id=v["name"]) for v in VECTORS if v["kind"] == kind])


every_dequant, every_quant = every("dequant"), every("quant")


def assert_same(found: Tensor, texts: list[str]) -> None:
    """Bits are those of the numbers, but that any NaN is as good as another."""
    found = found.cpu()
    wanted = floats(texts, found.dtype, list(found.shape))
    nan = torch.isnan(wanted)
    assert torch.equal(torch.isnan(found), nan)
    as_bits = exact.INTEGERS[found.dtype]
    assert torch.equal(found.view(as_bits)[~nan], wanted.view(as_bits)[~nan])


def expanded(blocks: str, scales: str, dtype: torch.dtype) -> list[str]:
    """What codes and scale bytes stand for, in the file's own words, by fractions: nan, inf, -0 or a number."""
    codes = [c for byte in bytes.fromhex(blocks) for c in (byte & 15, byte >> 4)]
    values = []
    for i, code in enumerate(codes):
        byte = bytes.fromhex(scales)[i // 32]
        if byte == 255:
            values.append("nan")
            continue
        bits, inf = (exact.encode(size, False, dtype) for size in (abs(exact.value(code, byte)), Fraction(2) ** 200))
        text = "inf" if bits == inf else str(exact.decode(bits, dtype))
        values.append(("-" if code & 8 else "") + text)
    return values


def plain(texts: list[str]) -> list[str]:
    """Numbers in one spelling."""
    return [t if t.lstrip("-") in ("nan", "inf") or t == "-0" else str(number(t)) for t in texts]


@every_dequant
def test_dequant_vectors_agree_with_fractions(vector: Vector) -> None:
    for dtype in vector["dtypes"]:
        assert expanded(vector["blocks"], vector["scales"], DTYPES[dtype]) == plain(vector["values"])


@every_quant
def test_quant_vectors_agree_with_fractions(vector: Vector) -> None:
    x = [as_float(t) for t in vector["x"]]
    for rule in vector["scale_rules"]:
        blocks = [exact.quant_block(x[i : i + 32], rule) for i in range(0, len(x), 32)]
        assert bytes(byte for _, byte in blocks).hex(" ") == vector["scales"], rule
        codes = [code for block, _ in blocks for code in block]
        assert bytes(a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True)).hex(" ") == vector["blocks"]
    for dtype in vector["dtypes"]:
        assert expanded(vector["blocks"], vector["scales"], DTYPES[dtype]) == plain(vector["values"]), dtype


def test_the_file_covers_what_it_promises() -> None:
    names = [(v["kind"], v["name"]) for v in VECTORS]
    assert len(set(names)) == len(names) >= 60 and all(v["working"] and v["rule"] for v in VECTORS)
    quants = [v for v in VECTORS if v["kind"] == "quant"]
    nibbles = {c for v in quants for byte in bytes.fromhex(v["blocks"]) for c in (byte & 15, byte >> 4)}
    assert nibbles == set(range(16))
    scales = {byte for v in VECTORS for byte in bytes.fromhex(v["scales"])}
    assert scales >= {0, 1, 126, 127, 128, 252, 253, 254, 255}
    assert {rule for v in quants for rule in v["scale_rules"]} == set(exact.RULES)


DEQUANT = {"op": lambda b, s, d: torch.ops.mxfp4.dequant(b, s, dtype=d), "definition": fmt.dequant}
QUANT = {"op": lambda x, r: torch.ops.mxfp4.quant(x, scale_rule=r), "definition": fmt.quant}
QDQ = {"op": lambda x, r: torch.ops.mxfp4.qdq(x, scale_rule=r), "definition": quant_modes.qdq}


@pytest.mark.parametrize("which", DEQUANT)
@every_dequant
def test_dequant(vector: Vector, which: str, device: str) -> None:
    blocks, scales = packed(vector["blocks"], vector["shape"], 2), packed(vector["scales"], vector["shape"], 32)
    for dtype in vector["dtypes"]:
        assert_same(DEQUANT[which](blocks.to(device), scales.to(device), DTYPES[dtype]), vector["values"])


@pytest.mark.parametrize("which", QUANT)
@every_quant
def test_quant(vector: Vector, which: str, device: str) -> None:
    for dtype, rule in itertools.product(vector["dtypes"], vector["scale_rules"]):
        x = floats(vector["x"], DTYPES[dtype], vector["shape"]).to(device)
        blocks, scales = (t.cpu() for t in QUANT[which](x, rule))
        assert torch.equal(scales, packed(vector["scales"], vector["shape"], 32)), (dtype, rule)
        assert torch.equal(blocks, packed(vector["blocks"], vector["shape"], 2)), (dtype, rule)
        assert_same(QDQ[which](x, rule), vector["values"])


@pytest.mark.parametrize("isa", kernels.isas())
def test_every_instruction_set(isa: str) -> None:
    for vector in VECTORS:
        blocks, scales = (np.frombuffer(bytes.fromhex(vector[n]), np.uint8) for n in ("blocks", "scales"))
        if vector["kind"] == "quant":
            x = floats(vector["x"], torch.float32, [-1, 32]).numpy()
            for rule in vector["scale_rules"]:
                found = kernels.quant(isa, x, RULE_CODES[rule])
                assert np.array_equal(found[0], blocks) and np.array_equal(found[1], scales), vector["name"]
        values = kernels.dequant(isa, blocks, scales)
        for dtype in vector["dtypes"]:
            if dtype == "float32":
                out = torch.from_numpy(values)
            else:
                out = torch.from_numpy(kernels.from_float(isa, values, DTYPE_CODES[dtype]).view(np.int16))
            assert_same(out.view(DTYPES[dtype]), vector["values"])
