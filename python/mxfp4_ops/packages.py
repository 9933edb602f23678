"""Say in a sentence which package is missing, before any work is done."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re


class MissingPackage(ModuleNotFoundError):
    """An optional package is absent or too old."""


def need_package(op: str, name: str, at_least: str = "0") -> None:
    """Raise MissingPackage unless ``name`` is installed, in version ``at_least`` (numbers and dots) or later."""
    if importlib.util.find_spec(name) is None:
        found = "none is installed"
    elif at_least != "0" and _numbers(version := importlib.metadata.version(name)) < _numbers(at_least):
        found = f"{version} is installed"
    else:
        return
    wanted = name if at_least == "0" else f"{name} >= {at_least}"
    raise MissingPackage(f"{op}: needs {wanted}, {found}. pip install 'mxfp4-ops[demo]' brings it.", name=name)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
