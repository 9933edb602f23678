"""The way without the dispatcher: taken only where nothing could tell, and with the same bits and the same refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mxfp4_ops.functional
import pytest
import torch
from mxfp4_ops import MXFP4Experts, PackedExperts, eager, prepare
from mxfp4_ops.layout import SLOTS
from problems import TINY, inputs, moe_call, weights
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def packed() -> PackedExperts:
    return prepare(weights(TINY), prefer="native_cpu")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of ``at_once`` gave a result."""
    seen: list[bool] = []
    original = mxfp4_ops.functional.at_once

    def spy(*args: Any, **kwargs: Any) -> Tensor | None:
        out = original(*args, **kwargs)
        seen.append(out is not None)
        return out

    monkeypatch.setattr(mxfp4_ops.functional, "at_once", spy)
    return seen


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_plain_calls_go_at_once_with_the_bits_of_the_op(
    packed: PackedExperts, at_once: list[bool], context: Callable[[], Any]
) -> None:
    args = inputs(TINY)
    with context():
        got, from_module = packed(*args), MXFP4Experts(packed)(*args)
    assert at_once == [True, True]
    op_args, options = moe_call(packed, *args)
    assert torch.equal(got, torch.ops.mxfp4.moe(*op_args, **options)) and torch.equal(from_module, got)


def test_compiling_and_tracing_see_the_op(packed: PackedExperts, at_once: list[bool]) -> None:
    args = inputs(TINY)
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(MXFP4Experts(packed), backend=backend, fullgraph=True)(*args)
    traced = make_fx(lambda *a: packed(*a))(*args)
    for graph in (*graphs, traced):
        targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        assert [t for t in targets if "mxfp4" in t] == ["mxfp4.moe.default" if graph is traced else "mxfp4.moe"]
    assert len(graphs) == 1 and at_once == []


def test_a_dispatch_mode_sees_the_op(packed: PackedExperts, at_once: list[bool]) -> None:
    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    args = inputs(TINY)
    with Record():
        packed(*args)
    assert names[0] == "mxfp4.moe.default" and at_once == []


def test_transforms_and_gradients_go_through_the_op(packed: PackedExperts, at_once: list[bool]) -> None:
    x, ids, routing = inputs(TINY, torch.float32)
    with pytest.raises(RuntimeError, match="functorch transforms"):  # torch's own limit, and not a gradient of zero
        torch.func.grad(lambda x: packed(x, ids, routing).sum())(x)
    for which in (x, routing, packed.w13_bias):
        assert which is not None
        which.requires_grad_()
        packed(x, ids, routing).sum().backward()
        assert which.grad is not None and which.grad.count_nonzero() > 0
        with torch.no_grad():
            packed(x, ids, routing)
        assert at_once.pop() and not at_once
        which.requires_grad_(False)


def test_what_is_refused_or_converted_goes_to_the_op(packed: PackedExperts, at_once: list[bool]) -> None:
    x, ids, routing = inputs(TINY)
    want = packed(x, ids, routing)
    strided = torch.stack((x, x), -1)[..., 0]
    assert torch.equal(packed(strided, ids, routing), want)
    wrong: list[tuple[Inputs, type[Exception], str]] = [
        ((x[:, :32], ids, routing), ValueError, r"x must be \[T, H\]"),
        ((x.double(), ids, routing), TypeError, "x must be"),
        ((x, ids + 100, routing), ValueError, "topk_ids must be below"),
        ((x, ids.short(), routing), TypeError, "topk_ids must be"),
        ((x, ids, routing.int()), TypeError, "topk_weights must be"),
        ((x, ids[:, :1], routing), ValueError, "topk_weights must have"),
    ]
    for args, error, message in wrong:
        with pytest.raises(error, match=f"mxfp4::moe: {message}"):
            packed(*args)
    assert at_once == [True, True] + [False] * len(wrong)
    with pytest.raises(RuntimeError, match=r"mxfp4::moe.*topk_ids"):  # torch says it, as of any op
        packed(x, ids.tolist(), routing)  # type: ignore[arg-type]


def test_importing_under_a_mode_does_not_make_the_mode_invisible() -> None:
    script = """
import torch
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    from mxfp4_ops import eager
    print(eager.unobserved(torch.empty(2)))
print(eager.unobserved(torch.empty(2)))
with torch.inference_mode():
    print(eager.unobserved(torch.empty(2)))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True", "True"]


def test_without_the_private_names_everything_goes_through_the_op(
    packed: PackedExperts, at_once: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "_PLAIN_KEYS", ())
    packed(*inputs(TINY))
    assert at_once == []


def leaf_arguments(packed: PackedExperts) -> dict[str, Any]:
    x, ids, routing = inputs(TINY)
    slots = {name: getattr(packed, name) for name in SLOTS}
    numbers = {"alpha": 0.0, "beta": 0.0, "limit": float("inf")}
    return {
        **{"x": x, "topk_ids": ids, "topk_weights": routing.float(), **slots},
        **{"hidden": packed.hidden, "intermediate": packed.intermediate, "activation": 0, **numbers},
        **{"weight_on_input": False, "batch_invariant": False},
    }


def broken(arguments: dict[str, Any]) -> dict[str, Any]:
    """One wrong value for every argument that decides what memory is touched."""
    a = arguments
    wrong = {name: a[name][:-1] for name in ("x", "topk_ids", "topk_weights", "w13", "w2", "w13_scale", "w2_scale")}
    wrong |= {f"{name} ": a[name][..., :-1] for name in ("x", "topk_ids", "topk_weights", "w13", "w2")}
    wrong |= {f"{name}  ": a[name].to(torch.int16) for name in ("topk_ids", "topk_weights", "w13", "w2")}
    wrong |= {f"{name}   ": a[name].t().contiguous().t() for name in ("x", "topk_ids", "topk_weights")}
    wrong |= {"w13_bias": a["w13_bias"][:, :-1], "w2_bias": a["w2_bias"][:-1], "w2_bias ": a["w2_bias"].int()}
    wrong |= {"x    ": a["x"].double(), "topk_ids    ": a["topk_ids"] + 99, "topk_ids     ": a["topk_ids"] - 99}
    wrong |= {"hidden": a["hidden"] + 64, "hidden ": 0, "hidden  ": -64, "hidden   ": a["hidden"] + 1}
    wrong |= {"intermediate": a["intermediate"] + 64, "intermediate ": 0, "activation": 7}
    return wrong


def test_the_leaf_itself_refuses_what_does_not_fit(packed: PackedExperts) -> None:
    arguments = leaf_arguments(packed)
    torch.ops.mxfp4._native_moe(*arguments.values())
    for name, value in broken(arguments).items():
        with pytest.raises(RuntimeError, match="mxfp4_ops"):
            torch.ops.mxfp4._native_moe(*(arguments | {name.strip(): value}).values())
