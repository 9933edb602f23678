"""Compile a transformers model, generate with it greedily, and time that: first token, tokens a second, graphs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .progress import Bar


@dataclass(frozen=True)
class Generation:
    """New tokens, and when they came. Seconds count from the call."""

    tokens: list[int]
    seconds: list[float]

    @property
    def first_token(self) -> float:
        """Seconds from the call to the first new token: the prefill."""
        return self.seconds[0]

    @property
    def tokens_per_second(self) -> float:
        """Of the decode, that is, without the prefill. NaN where there was no second token."""
        steps = len(self.seconds) - 1
        return steps / (self.seconds[-1] - self.seconds[0]) if steps else float("nan")


class _Timed:
    """A streamer for ``generate``: it gets the prompt, then every new token as soon as it is chosen."""

    def __init__(self, bar: Bar) -> None:
        self.bar, self.start = bar, time.perf_counter()
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        self._prompt_seen = False

    def put(self, tokens: Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.tokens += tokens.flatten().tolist()
        self.seconds.append(time.perf_counter() - self.start)
        self.bar.step()

    def end(self) -> None:
        """Nothing is held back."""


def compile_model(model: Any, backend: str = "inductor") -> None:
    """Compile the model's call in place, the whole graph, for any length of the prompt."""
    torch._dynamo.reset()
    model.compile(fullgraph=True, dynamic=True, backend=backend)


def compiled_graphs() -> int:
    """Count the graphs compiled since ``compile_model``."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def generate(model: Any, prompt: Tensor, new_tokens: int, title: str = "generating") -> Generation:
    """Continue prompt [1, T] greedily through transformers' own ``generate``, with a progress bar.

    The cache is static: its tensors keep their size from token to token, so that one compiled graph serves all of the
    decode.
    """
    with Bar(title, new_tokens, "token") as bar:
        timed = _Timed(bar)
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            cache_implementation="static",
            streamer=timed,
        )
    return Generation(timed.tokens, timed.seconds)


def warm_up(model: Any, prompt: Tensor, new_tokens: int, window: int | None) -> float:
    """Compile every graph that generation will need; return the seconds it took.

    It runs on a shorter prompt, so that the timed run meets a new length. Layers with a sliding window have one graph
    while the window fills and one when it is full: where the timed run fills it, so does this one.
    """
    start = time.perf_counter()
    fills = window is not None and prompt.shape[1] + new_tokens > window
    shorter = prompt if prompt.shape[1] < 4 else prompt[:, :-1]
    generate(model, shorter, new_tokens + 1 if fills else min(new_tokens, 3), "compiling")
    return time.perf_counter() - start
