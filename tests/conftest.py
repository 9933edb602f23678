"""Which devices and backends the suites run over."""

from __future__ import annotations

import pytest
import torch
from mxfp4_ops import BACKENDS, MoEProblem, arch_of
from mxfp4_ops.backends import Backend

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def backends_for(device: str) -> list[Backend]:
    """The backends that can run here; a backend that can not must say why, which test_dispatch shows."""
    problem = MoEProblem(arch_of(device), 1, 64, 64)
    return [b for b in BACKENDS if not list(b.why_not(problem))]


RUNNABLE = [(d, b) for d in DEVICES for b in backends_for(d)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=RUNNABLE, ids=[f"{b.name}-{d}" for d, b in RUNNABLE])
def runnable(request: pytest.FixtureRequest) -> tuple[str, Backend]:
    """(device, backend): every backend on every device where it runs."""
    return request.param
