"""Rules G, M and I of docs/rules.md that no other suite shows by itself: what is read, held and allocated."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import mxfp4_ops
import mxfp4_ops._kernels as kernels
import pytest
import torch
from guarded import guarded, sparse
from mxfp4_ops import Activation, MXFP4Experts, PackedExperts, _ops, prepare
from mxfp4_ops.backends import Backend
from problems import TINY, Problem, answer, errors, inputs, weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).parent
MIB = 1 << 20


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


@pytest.mark.parametrize("isa", kernels.isas())
def test_g4_nothing_is_read_past_an_end(isa: str) -> None:
    done = child(str(HERE / "guarded.py"), MXFP4_CPU_ISA=isa)
    assert done.returncode == 0 and f"cpu_{isa}" in done.stdout, done.stderr


def test_g4_the_guard_itself_works() -> None:
    """One byte past a guarded tensor ends the process."""
    done = child(
        "-c", "import ctypes, torch, guarded\nt = guarded.guarded(torch.zeros(5))\nctypes.string_at(t.data_ptr(), 21)"
    )
    assert done.returncode < 0
    assert guarded(torch.arange(5.0)).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


SIZES = [(2880, 1536, 1), (4096, 1536, 16), (2880, 2880, 32), (4096, 3072, 33), (7168, 1536, 33), (2880, 2880, 896)]


@pytest.mark.parametrize(("hidden", "intermediate", "tokens"), SIZES)
def test_g3_kernels_agree_with_float64_at_model_sizes(hidden: int, intermediate: int, tokens: int) -> None:
    """On the CPU's own kernels; every path by the number of rows is met."""
    problem = Problem("real", 1, hidden, intermediate, 1, tokens)
    experts, args = weights(problem), inputs(problem)
    out = prepare(experts, prefer="native_cpu")(*args)
    rows = slice(0, tokens, max(tokens // 33, 1))  # float64 takes its time
    wanted = answer(experts, *(a[rows] for a in args), Activation())
    whole, worst = errors(out[rows], wanted)
    assert whole < 2.6e-3 and worst < 3 * 2.6e-3


class Bytes(TorchDispatchMode):
    """Bytes that torch's own allocations hold, and the most they ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given | self.seen:
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", [b.name for b in mxfp4_ops.BACKENDS])
@pytest.mark.parametrize("sizes", [(2880, 2880), (7168, 2048)])
def test_m1_the_peak_of_prepare_is_the_result_and_little_more(
    name: str, interleaved: bool, sizes: tuple[int, int]
) -> None:
    experts = weights(Problem("m1", 3, *sizes, 1, 1))
    with Bytes() as held:
        packed = prepare(experts, prefer=name, interleaved=interleaved)
    relabelled = packed.w13.data_ptr() == experts.w13.data_ptr()
    assert held.peak <= (0 if relabelled else packed.nbytes()) + 64 * MIB
    assert all(t.dtype is torch.uint8 or t.dim() == 2 for t in packed.tensors())  # packed, but for biases


def test_m1_no_op_of_the_layer_expands_all_experts(runnable: tuple[str, Backend]) -> None:
    """All 32 experts in bfloat16 would be twice the bound."""
    device, backend = runnable
    problem = Problem("m1", 32, 512, 512, 4, 16)
    packed = prepare(weights(problem, device=device), prefer=backend.name)
    args, kwargs = _arguments(packed, inputs(problem, device=device))
    with Bytes() as held:
        _ops.moe(*args, **kwargs)
    assert held.peak < 32 * 3 * 512 * 512


def _arguments(packed: PackedExperts, args: tuple[Tensor, ...]) -> tuple[list[object], dict[str, object]]:
    sizes = {"layout": packed.layout, "hidden": packed.hidden, "intermediate": packed.intermediate}
    return [*args, *packed.tensors()[:6], []], sizes


def test_m2_nothing_of_the_loader_stays_alive(runnable: tuple[str, Backend]) -> None:
    """After packing by the module and after every op on the weights; scales take one byte for 32 elements."""
    device, backend = runnable
    experts = weights(TINY, device=device)
    interleaved = prepare(experts, prefer=backend.name, interleaved=True)  # copied by every backend
    module = MXFP4Experts(interleaved)
    module(*inputs(TINY, device=device))
    alive = [weakref.ref(t) for t in experts.tensors().values()] + [weakref.ref(experts)]
    del experts
    gc.collect()
    assert [r() for r in alive] == [None] * 7
    weights_in = 7 * 3 * 96 * 160
    codes_and_scales = sum(t.numel() for t in interleaved.tensors() if t.dtype is torch.uint8)
    padded = 7 * 3 * 128 * 192 if backend.layout.hidden_multiple == 64 else weights_in
    assert codes_and_scales == padded * 17 // 32


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_m3_dequant_into_a_given_output(monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype) -> None:
    if not native:
        monkeypatch.setattr(_ops, "runs_native", lambda x: False)
        monkeypatch.setattr(_ops, "_PIECE", 64 * 32)
    blocks, scales = torch.ops.mxfp4.quant(torch.randn(3, 50, 1024))
    out = torch.full((3, 50, 1024), 7.0, dtype=dtype)
    pointer = out.data_ptr()
    with Bytes() as held:
        _ops._dequant_out(blocks, scales, out=out)
    assert held.peak <= (0 if native else 64 * 32 * 40)  # some tensors of 64 blocks, not of 4800
    assert torch.equal(out, torch.ops.mxfp4.dequant(blocks, scales, dtype=dtype)) and out.data_ptr() == pointer


def test_i1_offsets_beyond_32_bits(runnable: tuple[str, Backend]) -> None:
    """Experts that lie over 2^31 and over 2^32 bytes into w13 and into w2; untouched pages of the stacks do not
    exist."""
    device, backend = runnable
    if device != "cpu":
        return  # virtual memory of this kind is the host's; docs/rules.md says what a GPU has to show
    count, at = 2100, (1050, 2099)
    one = prepare(weights(Problem("i1", 1, 2048, 2048, 1, 2)), prefer=backend.name)
    stacks = []
    for tensor in one.tensors():
        data = tensor.view(torch.uint8) if tensor.numel() else tensor
        stack = sparse(count, *data.shape[1:]) if data.numel() else data.new_empty(count, 0, dtype=tensor.dtype)
        for expert in at:
            stack[expert].copy_(data[0])
        stacks.append(stack.view(tensor.dtype))
    assert stacks[0].nbytes > 2**33 and stacks[3].nbytes > 2**32
    big = PackedExperts.from_tensors(stacks, one.layout, 2048, 2048, Activation())
    x, _, wts = inputs(Problem("i1", 1, 2048, 2048, 1, 2))
    wanted = one(x, torch.zeros(2, 1, dtype=torch.int64), wts)
    assert wanted.any()
    for expert in at:
        assert torch.equal(big(x, torch.full((2, 1), expert), wts), wanted)
