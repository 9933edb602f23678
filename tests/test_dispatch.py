"""The choice of a backend: a table of made-up problems, preferences, the environment, and reasons that are complete."""

from __future__ import annotations

import importlib.metadata
import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mxfp4_ops import (
    BACKENDS,
    Activation,
    MoEProblem,
    Unsupported,
    arch_of,
    dispatch,
    explain,
    prepare,
    problem_of,
    select,
)
from mxfp4_ops.backends import Backend, native_cpu
from mxfp4_ops.backends.base import need_activation, need_arch, need_x_format
from problems import GPT_OSS, TINY, weights


def problem(arch: str = "cpu_avx2", **changes: Any) -> MoEProblem:
    return MoEProblem(**{"arch": arch, "experts": 32, "hidden": 2880, "intermediate": 2880, "top_k": 4, **changes})


@pytest.mark.parametrize(
    ("arch", "changes", "name"),
    [
        ("cpu_avx512_bf16", {}, "native_cpu"),
        ("cpu_scalar", {"x_dtype": torch.float32}, "native_cpu"),
        ("cpu_avx2", {"activation": Activation("situ")}, "native_cpu"),
        ("cpu_avx2", {"batch_invariant": True, "weight_on_input": True}, "native_cpu"),
        ("sm_90", {}, "reference"),
        ("gfx950", {"bias": True}, "reference"),
        ("mps", {}, "reference"),
    ],
)
def test_d4_who_is_selected(arch: str, changes: dict[str, Any], name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert select(problem(arch, **changes)).name == name


def test_d2_the_fallback_warns_once_with_its_cost() -> None:
    unseen = problem("sm_75", hidden=32 * 731)
    with pytest.warns(UserWarning, match=r"'reference' runs arch=sm_75.*expanded to float32"):
        select(unseen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select(unseen)
        select(problem("sm_75", hidden=32 * 733), prefer="reference")  # asked for: no warning


def test_selection_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mxfp4_ops"):
        for _ in range(2):
            select(problem(hidden=32 * 737))
    assert [r.message.split()[0] for r in caplog.records] == ["native_cpu"]


def test_d3_prefer_restricts_and_refuses_at_once() -> None:
    assert select(problem(), prefer="reference").name == "reference"
    with pytest.raises(Unsupported) as caught:
        select(problem("sm_90"), prefer="native_cpu")
    text = str(caught.value)
    assert "native_cpu: needs cpu, this device is sm_90" in text and "arch=sm_90, experts=32, hidden=2880" in text
    assert "reference" not in text.splitlines()[-2] and issubclass(Unsupported, NotImplementedError)


def test_the_environment_prefers_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXFP4_BACKEND", "reference")
    assert select(problem()).name == "reference"
    assert select(problem(), prefer="native_cpu").name == "native_cpu"
    monkeypatch.setenv("MXFP4_BACKEND", "nope")
    with pytest.raises(ValueError, match="MXFP4_BACKEND must be one of native_cpu, reference, got 'nope'"):
        select(problem())


def test_d2_explain_lists_every_backend_with_its_state() -> None:
    text = explain(problem("sm_90"))
    assert text.splitlines()[0].startswith("mxfp4:") and "arch=sm_90" in text
    assert "native_cpu: needs cpu, this device is sm_90" in text and "reference: selected" in text
    text = explain(problem())
    assert "native_cpu: selected" in text and "reference: can run it" in text


def test_d1_explain_is_quick_and_select_agrees_with_it() -> None:
    start = time.perf_counter()
    for _ in range(100):
        explain(problem())
    assert (time.perf_counter() - start) / 100 < 0.01  # rule D1: under 10 ms; it takes some 20 us
    chosen = select(problem()).name
    assert f"  {chosen}: selected" in explain(problem())


def test_reasons_are_sentences_of_what_is_needed() -> None:
    p = problem("sm_120", activation=Activation("gelu"))
    assert list(need_arch(p, "sm_100", "sm_103")) == ["needs sm_100 or sm_103, this device is sm_120"]
    assert list(need_activation(p, "silu", "swigluoai")) == ["computes silu, swigluoai only, got activation 'gelu'"]
    assert list(need_x_format(p, "mxfp8")) == ["multiplies x_format 'mxfp8' only, got 'none'"]
    assert not [*need_arch(p, "sm_120"), *need_activation(p, "gelu"), *need_x_format(p, "none")]


def test_an_absent_library_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_cpu, "load_cpu", lambda: "the compiled CPU library is absent (…)")
    assert list(native_cpu.BACKEND.why_not(problem())) == [
        "needs the compiled kernels: the compiled CPU library is absent (…)"
    ]


def test_the_tag_is_the_decision() -> None:
    for backend in BACKENDS:
        assert dispatch.backend_of("op", backend.layout.tag) is backend
    assert prepare(weights(TINY)).layout == select(problem_of(weights(TINY))).layout.tag


def test_problem_of_describes_the_weights() -> None:
    found = problem_of(weights(GPT_OSS), activation=Activation("swigluoai", limit=7.0), top_k=2)
    assert (found.experts, found.hidden, found.intermediate, found.bias) == (2, 2880, 2880, True)
    assert found.arch == arch_of("cpu") and found.activation.limit == 7.0
    assert problem_of(weights(TINY.with_(bias=False)), device="meta").arch == "meta"


class _Point:
    """An entry point, as an installed package would offer it."""

    def __init__(self, name: str, value: object) -> None:
        self.name, self._value = name, value

    def load(self) -> object:
        return self._value


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def set_points(*points: _Point) -> None:
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda group: points if group == dispatch.ENTRY_POINTS else ()
        )
        dispatch.backends.cache_clear()

    yield set_points
    dispatch.backends.cache_clear()


def test_other_packages_append_backends(offer: Any) -> None:
    base = BACKENDS[-1]
    layout = type(base.layout)("mine.v1", 32, 32, base.layout.specs, base.layout.pack, base.layout.unpack)
    mine = Backend("mine", layout, base.why_not, base.run)
    offer(_Point("mine", mine))
    assert [b.name for b in dispatch.backends()] == [*(b.name for b in BACKENDS), "mine"]
    packed = prepare(weights(TINY), prefer="mine")
    assert packed.layout == "mine.v1" and dispatch.backend_of("op", "mine.v1") is mine
    x = torch.randn(2, TINY.hidden)
    ids, routing = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    wanted = prepare(weights(TINY), prefer="reference")(x, ids, routing)
    assert torch.equal(packed(x, ids, routing), wanted)
    assert select(problem()).name == "native_cpu"  # asked after ours


def test_an_offer_that_is_no_backend_is_named(offer: Any) -> None:
    offer(_Point("odd", object()))
    with pytest.raises(TypeError, match=r"entry point 'odd' of mxfp4_ops.backends must name a Backend, got object"):
        dispatch.backends()
    offer(_Point("again", BACKENDS[0]))
    with pytest.raises(ValueError, match=r"entry point 'again' must bring a new name and a new layout tag"):
        dispatch.backends()
