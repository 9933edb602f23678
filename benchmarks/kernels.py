"""Time the tile kernels of every instruction set of this CPU, one thread, weights in L2: where `many` overtakes `few`.

    python benchmarks/kernels.py

Prints packed GB/s and GFLOP/s for m rows of x. Needs the test module mxfp4_ops._kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mxfp4_ops import _kernels

SUPERS = 8 * 18  # 18 parts of 512 k: 157 KB of weights, which every L2 holds
K = SUPERS * 64
REPEAT = 50  # of integer products a call, since splitting the rows is part of it
Product = Callable[[int], object]
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def tile(rng: np.random.Generator) -> np.ndarray:
    out = rng.integers(0, 256, (SUPERS, 1088), dtype=np.uint8)
    out[:, :64] = rng.integers(119, 123, (SUPERS, 64), dtype=np.uint8)
    return out.ravel()


def best_seconds(call: Callable[[], object]) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + 0.06
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    rng = np.random.default_rng(0)
    weights = tile(rng)
    fp32 = rng.standard_normal((128, K), dtype=np.float32)
    bf16 = (fp32.view(np.uint32) >> 16).astype(np.uint16)
    values = (fp32.view(np.uint32) & 0xFFFF0000).view(np.float32)  # two planes of integers; three for their products
    wide = values * values[::-1]
    wide = (wide.view(np.uint32) & 0xFFFF0000).view(np.float32)
    for isa in _kernels.isas():
        if isa == "scalar":
            continue
        products: dict[str, Product] = {
            "few": lambda m, i=isa: _kernels.dot(i, "few", weights, fp32[:m]),
            "many": lambda m, i=isa: _kernels.dot(i, "many", weights, fp32[:m]),
            "few_bf16": lambda m, i=isa: _kernels.dot_bf16(i, "few", weights, bf16[:m]),
            "many_bf16": lambda m, i=isa: _kernels.dot_bf16(i, "many", weights, bf16[:m]),
            "int, two planes": lambda m, i=isa: _kernels.dot_int(i, weights, list(values[:m]), REPEAT),
            "int, three": lambda m, i=isa: _kernels.dot_int(i, weights, list(wide[:m]), REPEAT),
        }
        for kind, product in products.items():
            if product(1) is None:
                continue
            print(f"{isa:12} {kind:16}", end="")
            for m in ROWS:
                seconds = best_seconds(lambda p=product, m=m: p(m)) / (REPEAT if kind.startswith("int") else 1)
                speeds = f"{weights.nbytes / seconds / 1e9:.1f}/{2 * 32 * K * m / seconds / 1e9:.0f}"
                print(f"  {m}: {speeds}", end="", flush=True)
            print("   (rows: GB/s / GFLOP/s)")


if __name__ == "__main__":
    main()
