"""What this machine can do at most: bytes read and floating-point operations a second, measured, not looked up."""

from __future__ import annotations

import time

import torch


def _best(call: object, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return min(times)


def read_bandwidth() -> float:
    """Bytes a second of the best of several sums over 1 GiB, all threads of torch."""
    data = torch.ones(1 << 28, dtype=torch.float32)
    data.sum()
    return data.numel() * 4 / _best(data.sum, 8)


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of the best of several products 1024 x 2880 x 5760 by torch."""
    a, b = torch.randn(1024, 2880, dtype=dtype), torch.randn(5760, 2880, dtype=dtype)
    torch.nn.functional.linear(a, b)
    return 2 * 1024 * 2880 * 5760 / _best(lambda: torch.nn.functional.linear(a, b), 4)
