"""Time the tile kernels of every instruction set of this CPU, one thread, weights in L2: where `many` overtakes `few`.

    python benchmarks/kernels.py

Prints packed GB/s and GFLOP/s for m rows of x. Needs the test module mxfp4_ops._kernels.
"""

from __future__ import annotations

import time

import numpy as np
from mxfp4_ops import _kernels

SUPERS = 8 * 18  # 18 parts of 512 k: 157 KB of weights, which every L2 holds
K = SUPERS * 64
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def tile(rng: np.random.Generator) -> np.ndarray:
    out = rng.integers(0, 256, (SUPERS, 1088), dtype=np.uint8)
    out[:, :64] = rng.integers(119, 123, (SUPERS, 64), dtype=np.uint8)
    return out.ravel()


def best_seconds(call: object) -> float:
    call()  # type: ignore[operator]
    best, end = float("inf"), time.perf_counter() + 0.06
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()  # type: ignore[operator]
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    rng = np.random.default_rng(0)
    weights = tile(rng)
    fp32 = rng.standard_normal((128, K), dtype=np.float32)
    bf16 = (fp32.view(np.uint32) >> 16).astype(np.uint16)
    for isa in _kernels.isas():
        if isa == "scalar":
            continue
        for kind in ("few", "many", "few_bf16", "many_bf16"):
            name, rows = (kind[:-5], bf16) if kind.endswith("bf16") else (kind, fp32)
            run = _kernels.dot_bf16 if rows is bf16 else _kernels.dot
            if rows is bf16 and run(isa, name, weights, rows[:1]) is None:
                continue
            print(f"{isa:12} {kind:10}", end="")
            for m in ROWS:
                x = np.ascontiguousarray(rows[:m])
                seconds = best_seconds(lambda i=isa, n=name, r=run, x=x: r(i, n, weights, x))
                print(
                    f"  {m}: {weights.nbytes / seconds / 1e9:.1f}/{2 * 32 * K * m / seconds / 1e9:.0f}",
                    end="",
                    flush=True,
                )
            print("   (rows: GB/s / GFLOP/s)")


if __name__ == "__main__":
    main()
