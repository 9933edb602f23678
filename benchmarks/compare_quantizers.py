"""Run the quantizers of other libraries beside ours and count the bytes that differ: one command, one table.

    python benchmarks/compare_quantizers.py
    python benchmarks/compare_quantizers.py --triton-kernels DIR --triton-kernels-3-5 DIR --vllm DIR --write-golden

Every library that can be imported is run on a CPU, Triton kernels by Triton's interpreter; a library that cannot be
gives a row that says why. DIR holds the package ``triton_kernels`` or ``vllm`` where it is not installed.
``--write-golden`` puts what the libraries answered into tests/golden/quantizers.json. The exit status is 1 when a mode
of ``QUANT_MODES`` differs from its library where the library's answer is defined.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

import quantizer_libraries
import torch
from mxfp4_ops import format, quant_modes
from quantizer_inputs import golden_blocks, groups, held_in
from quantizer_libraries import LIBRARIES, Library
from torch import Tensor

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "quantizers.json"
COLUMNS = ("mode", "library", "inputs", "blocks", "bytes", "differ", "left out", "what differs / what is left out")


def ours(library: Library, x: Tensor) -> tuple[Tensor, Tensor]:
    """One code a byte [n, 32] and scale bytes [n]; a library that returns values is met by values [n, 32]."""
    if library.values:
        return quant_modes.qdq(x, library.mode), torch.zeros(len(x), dtype=torch.uint8)
    blocks, scales = quant_modes.quant(x, library.mode)
    return format.codes_of(blocks), scales[:, 0]


def unsigned_nan(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Drop the sign of codes that stand for a NaN: IEEE 754 leaves it open, and x86 and GPUs differ."""
    nan = torch.isnan(x) | (torch.isinf(x) & (scales == 255)[:, None])
    return torch.where(nan, codes & 7, codes)


def differing(library: Library, x: Tensor) -> tuple[Tensor, Tensor]:
    """Differing elements [n, 32] and scale bytes [n] of one dtype's blocks, in everything that is compared."""
    (found, bytes_found), (wanted, bytes_wanted) = library.run(x), ours(library, x)
    if library.values:
        same = (found == wanted) | (found.isnan() & wanted.isnan())  # such a library has no sign of zero
        return ~same, torch.zeros(len(x), dtype=torch.bool)
    codes = unsigned_nan(x, found, bytes_found) != unsigned_nan(x, wanted, bytes_wanted)
    return codes, bytes_found != bytes_wanted


def compare(library: Library, dtype: torch.dtype) -> tuple[list[str], bool]:
    """One row of the table, and whether anything differs."""
    counts, where = {"blocks": 0, "differ": 0, "left": 0}, []
    for name, x in groups(dtype).items():
        left = library.left_out(x.float()) | library.interpreter_is_wrong(x)
        codes, scales = differing(library, x)
        codes, scales = codes & ~left[:, None], scales & ~left
        number = int(codes.sum()) + int(scales.sum())
        counts["blocks"] += int((~left).sum())
        counts["left"] += int(left.sum())
        counts["differ"] += number
        if number:
            where.append(f"{name}: {int(scales.sum())} scale bytes, {int(codes.sum())} codes")
    size = counts["blocks"] * (32 if library.values else 17)
    unit = "values" if library.values else "bytes"
    text = "; ".join(where) or (library.reason(dtype) if counts["left"] else "")
    cells = (counts["blocks"], f"{size} {unit}", counts["differ"], counts["left"], text)
    return [library.mode, library.title(), str(dtype)[6:], *map(str, cells)], bool(counts["differ"])


def golden(library: Library) -> dict[str, object]:
    """What a library answered on the golden blocks; null where its answer is not defined."""
    x = golden_blocks()
    codes, scales = library.run(held_in(library.dtypes[0], x))
    codes = unsigned_nan(x, codes, scales)
    left = (library.left_out(x) | library.not_exact(x)).tolist()
    rows = ["".join(f"{c:x}" for c in row) for row in codes.tolist()]
    return {
        "library": library.title(),
        "captured": "live, codes of NaN without sign",
        "codes": [None if out else row for out, row in zip(left, rows, strict=True)],
        "scales": [None if out else byte for out, byte in zip(left, scales.tolist(), strict=True)],
    }


def write_golden(rows: dict[str, dict[str, object]]) -> None:
    inputs = ["".join(f"{v & 0xFFFFFFFF:08x}" for v in row) for row in golden_blocks().view(torch.int32).tolist()]
    old = json.loads(GOLDEN.read_text())["modes"] if GOLDEN.exists() else {}
    table = {"inputs": inputs, "modes": dict(sorted((old | rows).items()))}
    GOLDEN.write_text(json.dumps(table, indent=1) + "\n")


def show(rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [list(COLUMNS), *rows]) for i in range(len(COLUMNS) - 1)]
    for row in [list(COLUMNS), *rows]:
        print("  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + row[-1:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton-kernels", metavar="DIR")
    parser.add_argument("--triton-kernels-3-5", metavar="DIR")
    parser.add_argument("--vllm", metavar="DIR")
    parser.add_argument("--write-golden", action="store_true")
    arguments = parser.parse_args()
    quantizer_libraries.FOLDERS.update({k: v for k, v in vars(arguments).items() if isinstance(v, str)})
    rows, captured, failed = [], {}, False
    for library in LIBRARIES:
        try:
            library.run(torch.zeros(1, 32, dtype=library.dtypes[0]))
        except Exception as error:  # whatever keeps a foreign library from running belongs into the table
            reason = f"cannot run here: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
            rows.append([library.mode, library.title(), *[""] * 5, reason])
            continue
        for dtype in library.dtypes:
            row, differs = compare(library, dtype)
            rows.append(row)
            failed |= differs
        if library.golden:
            captured[library.mode] = golden(library)
    show(rows)
    if arguments.write_golden:
        write_golden(captured)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
