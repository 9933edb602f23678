"""The documents are true: every block of Python in them runs, and docs/ops.md has each op with each argument."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import mxfp4_ops
import pytest
import torch
from mxfp4_ops import _schemas

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WITH_CODE = [p for p in PAGES if "```python\n" in p.read_text()]


@pytest.mark.parametrize("page", WITH_CODE, ids=[p.name for p in WITH_CODE])
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = page.read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    for match in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.S | re.M):
        line = text.count("\n", 0, match.start(1))
        exec(compile("\n" * line + match[1], str(page), "exec"), names)


def test_the_vectors_readme_reads_every_number_of_its_file() -> None:
    folder = Path(__file__).parent / "golden"
    (block,) = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text(), flags=re.S | re.M)
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    vectors = json.loads((folder / "mxfp4_vectors.json").read_text())
    for vector in vectors["vectors"] if isinstance(vectors, dict) else vectors:
        for text in (*vector.get("x", ()), *vector["values"]):
            exact_value = names["number"](str(text))
            assert isinstance(exact_value, float)
    assert names["number"]("-7/2") == -3.5 and math.copysign(1, names["number"]("-0")) == -1
    assert names["number"]("0x1.8p-127") == 1.5 * 2.0**-127


def sections() -> dict[str, str]:
    parts = re.split(r"^## ", (DOCS / "ops.md").read_text(), flags=re.M)[1:]
    return {part.partition("\n")[0].strip("`"): part for part in parts}


@pytest.mark.parametrize("op", _schemas.PUBLIC)
def test_ops_md_has_every_argument(op: str) -> None:
    found = sections()
    assert op in found, f"docs/ops.md has no section `{op}`"
    name, _, overload = op.partition(".")
    schema = getattr(getattr(torch.ops.mxfp4, name), overload or "default")._schema
    inherited = found["moe"] if name.startswith("moe") else ""
    missing = [a.name for a in schema.arguments if f"`{a.name}`" not in found[op] + inherited]
    assert not missing


def test_ops_md_names_every_alias_and_public_function() -> None:
    text = (DOCS / "ops.md").read_text()
    for alias in _schemas.ALIASES:
        assert f"`{alias}`" in text
    for formula in mxfp4_ops.ACTIVATIONS:
        assert f"`{formula}`" in text


@pytest.mark.parametrize("page", PAGES, ids=[p.name for p in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[\w-]+)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
