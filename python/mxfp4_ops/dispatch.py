"""Choose a backend, once, before weights are touched; and find it again by its layout's tag."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import warnings
from typing import cast

from .backends import BACKENDS, Backend
from .errors import Unsupported, need, need_type
from .problem import MoEProblem

ENTRY_POINTS = "mxfp4_ops.backends"  # each names a Backend; they are asked after ours
PREFER_VARIABLE = "MXFP4_BACKEND"  # the one environment variable of dispatch, read when select() is called

_logger = logging.getLogger("mxfp4_ops")
_BY_TAG = {backend.layout.tag: backend for backend in BACKENDS}


@functools.lru_cache(maxsize=1)
def backends() -> tuple[Backend, ...]:
    """Our backends, then those that other packages offer by the entry-point group ``mxfp4_ops.backends``."""
    found = list(BACKENDS)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        found.append(_offered(point.load(), point.name, found))
    return tuple(found)


def _offered(backend: object, name: str, known: list[Backend]) -> Backend:
    need_type(
        isinstance(backend, Backend),
        lambda: f"mxfp4_ops: entry point {name!r} of {ENTRY_POINTS} must name a Backend, got {type(backend).__name__}.",
    )
    offered = cast(Backend, backend)
    taken = {b.name for b in known} | {b.layout.tag for b in known}
    need(
        offered.name not in taken and offered.layout.tag not in taken,
        lambda: (
            f"mxfp4_ops: entry point {name!r} must bring a new name and a new layout tag, got {offered.name!r} and "
            f"{offered.layout.tag!r}."
        ),
    )
    return offered


def backend_of(op: str, layout: str) -> Backend:
    """The backend that owns a layout's tag. This look-up is all the dispatch that happens at run time."""
    found = _BY_TAG.get(layout)
    if found is None:  # not one of ours: a plug-in's, or a mistake
        known = {b.layout.tag: b for b in backends()}
        need(
            layout in known,
            lambda: (
                f"{op}: layout must be one of {', '.join(known)}, got {layout!r}. Weights are packed by "
                "mxfp4_ops.prepare(); pass the layout it returned."
            ),
        )
        found = known[layout]
    return found


def select(problem: MoEProblem, prefer: str | None = None) -> Backend:
    """Return the first backend that can run ``problem``, or raise with every backend's reasons.

    ``prefer`` (or else the environment variable MXFP4_BACKEND) names the only candidate.
    Raises: Unsupported, listing each backend with its reasons; ValueError for an unknown name, listing the known ones.
    """
    name = os.environ.get(PREFER_VARIABLE, "") if prefer is None else prefer
    candidates = backends()
    if name:
        known = [b.name for b in candidates]
        source = "prefer" if prefer is not None else PREFER_VARIABLE
        need(name in known, lambda: f"mxfp4_ops.select: {source} must be one of {', '.join(known)}, got {name!r}.")
        candidates = tuple(b for b in candidates if b.name == name)
    for backend in candidates:
        if next(iter(backend.why_not(problem)), None) is None:
            _announce(backend, problem, chosen=bool(name))
            return backend
    raise Unsupported(_table("mxfp4: no backend can run this mixture of experts.", problem, candidates))


@functools.lru_cache(maxsize=256)
def _announce(backend: Backend, problem: MoEProblem, *, chosen: bool) -> None:
    """Say once per problem what was selected; warn when it is slow and nobody asked for it."""
    _logger.info("%s runs %s", backend.name, problem)
    if backend.slow and not chosen:
        warnings.warn(f"mxfp4_ops: {backend.name!r} runs {problem}: {backend.slow}.", stacklevel=4)


def explain(problem: MoEProblem) -> str:
    """Say which backend would run ``problem``, and why each other one would not. Needs no weights and no device
    memory."""
    return _table("mxfp4: who can run this mixture of experts.", problem, backends())


def _table(title: str, problem: MoEProblem, candidates: tuple[Backend, ...]) -> str:
    lines, selected = [title, f"  problem: {problem}"], False
    for backend in candidates:
        reasons = list(backend.why_not(problem))
        state = "; ".join(reasons) if reasons else "can run it" if selected else "selected"
        selected = selected or not reasons
        lines.append(f"  {backend.name}: {state}")
    if not selected:
        lines.append("Relax one of the needs above, or add 'reference' to the candidates (slow, any device).")
    return "\n".join(lines)
