"""Time several systems in alternating rounds: each round asks every system once, on the same inputs, in a new order."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """Seconds of one call over the rounds."""

    p20: float
    p50: float
    p80: float
    rounds: int


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def alternate(
    calls: Mapping[str, Callable[[int], object]], device: torch.device, *, rounds: int, seconds: float
) -> dict[str, Times]:
    """Run ``calls[name](round)`` for at least 3 and at most ``rounds`` rounds, or until ``seconds`` have gone.

    The round's number lets a call walk through inputs, so that weights come from memory and not from a cache. One round
    before the first is not counted.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    order, started = list(calls), time.perf_counter()
    shuffle = random.Random(0)
    for number in range(rounds + 1):
        shuffle.shuffle(order)
        for name in order:
            taken = _seconds(lambda n=name, r=number: calls[n](r), device)
            if number:
                found[name].append(taken)
        if number >= 3 and time.perf_counter() - started > seconds:
            break
    return {name: _summary(values) for name, values in found.items()}


def _summary(values: list[float]) -> Times:
    cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9
    return Times(cuts[1], statistics.median(values), cuts[7], len(values))
