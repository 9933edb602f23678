"""The results, as aligned text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


class Report:
    """Rows of (label, text), and the numbers behind them under short names."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[tuple[str, str]] = []
        self.values: dict[str, object] = {}

    def add(self, label: str, text: str, **values: object) -> None:
        """One row; ``values`` go to the JSON file."""
        self.rows.append((label, text))
        self.values |= values

    def __str__(self) -> str:
        width = max((len(label) for label, _ in self.rows), default=0)
        return "\n".join([self.title, *(f"  {label:<{width}}  {text}" for label, text in self.rows)])

    def finish(self, path: Path | None) -> Mapping[str, object]:
        """Print the table, write the JSON file where one is wanted, return its values."""
        print(self, flush=True)
        if path is not None:
            path.write_text(json.dumps(self.values, indent=2) + "\n", encoding="utf-8")
        return self.values


def megabytes(count: int) -> str:
    """Bytes as people write them: 1 MB = 10^6 bytes."""
    return f"{count / 1e6:,.1f} MB"
