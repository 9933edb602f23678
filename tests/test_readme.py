"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import mxfp4_ops
import pytest
import torch
from mxfp4_ops.demo.checkpoint_writer import SMALL, write_checkpoint

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "gpt-oss-20b", SMALL, seed=0)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "selected" in capsys.readouterr().out
    y, packed = names["y"], names["packed"]
    assert isinstance(y, torch.Tensor) and isinstance(packed, mxfp4_ops.PackedExperts)
    assert y.shape == (5, packed.hidden) and y.dtype is torch.bfloat16 and torch.isfinite(y).all()


def test_the_two_commands_are_marked_for_ci() -> None:
    for name in ("run", "test"):
        assert re.search(rf"^<!-- command: {name} -->\n```\n.+\n```$", README, flags=re.M)


def test_the_tables_name_what_exists() -> None:
    for name in re.findall(r"^\| `(\w+)`", README, flags=re.M):
        assert hasattr(torch.ops.mxfp4, name)
    for backend in mxfp4_ops.BACKENDS:
        assert backend.name in README
    for link in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (Path(__file__).resolve().parents[1] / link).exists(), link
