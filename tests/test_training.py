"""A training step as people write it: compiled, checkpointed, in bounded memory, with adapters around the experts."""

from __future__ import annotations

import importlib.util
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from mxfp4_ops import MXFP4Experts, moe_backward, prepare
from mxfp4_ops.backends import Backend
from problems import TINY, Problem, inputs, weights
from test_autograd import backward_call, make, pack
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

Runnable = tuple[str, Backend]
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "lora_on_packed_experts.py"


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Step:
    """Loss of a layer whose experts' biases learn, as a function of x and the routing weights before their softmax."""

    def __init__(self, runnable: Runnable) -> None:
        device, backend = runnable
        self.experts = MXFP4Experts(prepare(weights(TINY, device=device), prefer=backend.name))
        self.experts.w13_bias.requires_grad_()

    def __call__(self, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return self.experts(x * 2, ids, routing.softmax(-1)).float().square().sum()

    def gradients(self, run: Any, tokens: int, device: str) -> tuple[Tensor, ...]:
        x, ids, routing = inputs(TINY.with_(tokens=tokens), torch.bfloat16, device=device)
        leaves = (x.requires_grad_(), routing.requires_grad_(), self.experts.w13_bias)
        return torch.autograd.grad(run(x, ids, routing), leaves)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_forward_and_backward_compile(runnable: Runnable, compiler: str) -> None:
    device, step = runnable[0], Step(runnable)
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (9, 2, 3, 5):
        theirs = step.gradients(step, tokens, device)
        for a, b in zip(step.gradients(compiled, tokens, device), theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7 if a.dtype is torch.bfloat16 else 1e-4, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(runnable: Runnable, use_reentrant: bool) -> None:
    step, wanted, got = Step(runnable), [], []
    x, ids, routing = inputs(TINY, device=runnable[0])
    leaves = (x.requires_grad_(), routing.requires_grad_(), step.experts.w13_bias)
    for run, into in ((step, wanted), (lambda *a: checkpoint(step, *a, use_reentrant=use_reentrant), got)):
        for leaf in leaves:
            leaf.grad = None
        run(x, ids, routing).backward()
        into.extend(leaf.grad for leaf in leaves)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


class LiveBytes(TorchDispatchMode):
    """Count the bytes of storages that ops make and that still live, and remember the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def _drop(self, key: int, size: int) -> None:
        self.now -= size
        del self._seen[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._seen:
                    self._seen[key] = weakref.finalize(storage, self._drop, key, storage.nbytes())
                    self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out


def test_the_counter_counts() -> None:
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a + 1
        del a
        c = b[:10] * 2
    assert live.peak == 8000 and live.now == 4040 and len(c) == 10


@pytest.mark.parametrize("bias", [True, False])
def test_the_peak_is_one_expert(runnable: Runnable, bias: bool) -> None:
    """Sixty-four experts, all used: what lives at once is some float32 matrices of one, and never a copy of all."""
    device, _ = runnable
    problem = Problem("memory", 64, 256, 256, 4, 64, bias=bias)
    layer = make(problem, torch.bfloat16, device)
    args, options = backward_call(layer, pack(runnable, layer))
    options |= {"output_mask": [True, True, bias, bias]}
    with LiveBytes() as live:
        results = moe_backward.moe_backward(*args, **options)
    assert layer.ids.unique().numel() > 60
    one = 3 * problem.hidden * problem.intermediate * 4  # bytes of an expert in float32
    results_and_rows = sum(t.nbytes for t in results) + 16 * problem.tokens * problem.hidden * 4
    slots = layer.ids.numel() if device != "cpu" else 16
    rows = 12 * slots * 2 * problem.intermediate * 4
    assert one < live.peak < 4 * one + results_and_rows + rows
    assert 4 * one + results_and_rows + rows < problem.experts * one / 2  # a bf16 copy of all


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lora_on_packed_experts", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_adapters_around_packed_experts_learn() -> None:
    lora = example()
    torch.manual_seed(0)
    _, before = lora.make_layer()
    losses, layer = lora.train(steps=50, seed=0)
    assert losses[-1] < losses[0] / 3, losses
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        assert torch.equal(getattr(layer.packed, name), getattr(before, name)), name
    start = lora.AdaptedLayer(layer.router, before, lora.RANK)
    assert torch.equal(start.w13_bias, before.w13_bias)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm() > 0, name
