"""A progress bar: tqdm where it is installed, else a line that grows on stderr."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO


class Bar:
    """Count ``total`` steps on stderr: ``with Bar("packing", 24, "layer") as bar: ... bar.step()``."""

    def __init__(self, title: str, total: int, unit: str, *, stream: TextIO | None = None, plain: bool = False) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = 0
        self._stream = sys.stderr if stream is None else stream
        self._tqdm = None if plain else _tqdm(title, total, unit, self._stream)
        self._show()

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if self._tqdm is not None:
            self._tqdm.update()
        self._show()

    def over(self, items: Iterable[int]) -> Iterator[int]:
        """Pass items on, a step after each."""
        for item in items:
            yield item
            self.step()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._tqdm is not None:
            self._tqdm.close()
        else:
            print(file=self._stream)

    def _show(self) -> None:
        # About twenty lines' worth of carriage returns, not one a step: logs stay short.
        every = max(self.total // 20, 1)
        if self._tqdm is None and (self.done % every == 0 or self.done == self.total):
            print(f"\r{self.title}: {self.done}/{self.total} {self.unit}s", end="", file=self._stream, flush=True)


def _tqdm(title: str, total: int, unit: str, stream: TextIO) -> Any:
    if importlib.util.find_spec("tqdm") is None:
        return None
    # By name: tqdm carries no types, and stubs for it may or may not be installed.
    return importlib.import_module("tqdm").tqdm(total=total, desc=title, unit=unit, file=stream)
