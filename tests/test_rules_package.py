"""Rules C, D and P of docs/rules.md that no other suite shows by itself: graphs, devices, what importing costs."""

from __future__ import annotations

import os
import subprocess
import sys

import mxfp4_ops
import pytest
import torch
from mxfp4_ops import MoEProblem, MXFP4Experts, Unsupported, _ops, explain, prepare, reference, select, unprepare
from mxfp4_ops.activation import resolve
from mxfp4_ops.backends import Backend
from problems import TINY, inputs, moe_call, weights
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.mxfp4
FIRST_CALL = """
import socket, sys, time, warnings
import torch
def refused(*args, **kwargs):
    raise AssertionError("the network was used")
socket.socket = socket.create_connection = refused
warnings.simplefilter("ignore")
sys.modules["triton"] = None
start = time.perf_counter()
import mxfp4_ops as m
imported = time.perf_counter() - start
b, s = m.quant_mxfp4(torch.randn(4, 640, 320)); d, t = m.quant_mxfp4(torch.randn(4, 320, 320))
w = m.ExpertWeights(b, s, None, d, t, None)
start = time.perf_counter()
for backend in m.BACKENDS:
    p = m.prepare(w, prefer=backend.name)
    for dtype in (torch.float32, torch.bfloat16):
        p(torch.randn(3, 320, dtype=dtype), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
print(imported, time.perf_counter() - start, sorted(n for n in sys.modules if n.startswith("triton")))
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_p1_p2_p3_the_first_call_needs_no_compiler_no_network_and_no_time() -> None:
    """No program can be found (PATH is empty), no socket opened, triton not imported; import and first calls under two
    seconds each."""
    imported, first, rest = run(FIRST_CALL, PATH="", CC="/nonexistent", CXX="/nonexistent").split(" ", 2)
    assert float(imported) < 2.0 and float(first) < 2.0 and rest.strip() == "['triton']"


def test_p2_the_package_starts_no_process_and_opens_no_connection() -> None:
    import pathlib

    demo = ("demo", "__main__")  # the demo's own fetch of a tokenizer is asked for by name
    for path in pathlib.Path(mxfp4_ops.__file__).parent.rglob("*.py"):
        if not set(path.with_suffix("").parts) & set(demo):
            words = ("subprocess", "urllib", "socket", "requests", "cpp_extension", "load_inline", "os.system")
            assert not [w for w in words if w in path.read_text()], path


def test_d1_explain_is_quick_at_its_first_call_and_needs_no_weights() -> None:
    code = (
        "import time, torch, mxfp4_ops as m\n"
        "p = [m.MoEProblem(a, 32, 2880, 2880) for a in ('cpu_avx2', 'sm_90', 'gfx950')]\n"
        "start = time.perf_counter(); texts = [m.explain(x) for x in p]\n"
        "print((time.perf_counter() - start) / 3); assert all('reference' in t for t in texts)\n"
    )
    assert min(float(run(code)) for _ in range(2)) < 0.01


def test_d2_an_error_lists_every_backend_with_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MoEProblem("sm_75", 32, 2880, 2880)
    nobody = [Backend(b.name, b.layout, lambda p, n=b.name: iter([f"{n} is out"]), b.run) for b in mxfp4_ops.BACKENDS]
    monkeypatch.setattr(mxfp4_ops.dispatch, "backends", lambda: tuple(nobody))
    with pytest.raises(Unsupported) as caught:
        select(problem)
    assert all(f"{b.name}: {b.name} is out" in str(caught.value) for b in nobody)
    assert "sm_75" in str(caught.value) and "Relax one of the needs" in str(caught.value)


@pytest.mark.parametrize(
    "arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "xpu", "mps"]
)
def test_d4_there_is_always_a_path(arch: str) -> None:
    assert "reference: " in explain(MoEProblem(arch, 32, 2880, 2880, bias=True))
    assert select(MoEProblem(arch, 32, 2880, 2880, bias=True), prefer="reference").name == "reference"
    assert select(MoEProblem(f"cpu_{arch}", 32, 2880, 2880)).name == mxfp4_ops.BACKENDS[0].name


def test_d5_the_device_of_the_tensors_counts(runnable: tuple[str, Backend]) -> None:
    """And not the default device: new tensors stand where x is, and a tensor elsewhere is refused by name."""
    device, backend = runnable
    experts, args = weights(TINY, device=device), inputs(TINY, device=device)
    packed = prepare(experts, prefer=backend.name)
    wanted = packed(*args)
    with torch.device("meta"):
        assert torch.equal(packed(*args), wanted) and packed(*args).device == args[0].device
        mine = torch.arange(7, dtype=torch.int32, device=device)
        assert torch.equal(packed(*args, expert_ids=mine), wanted)
        blocks, scales = OPS.quant(args[0])
        out = [blocks, scales, OPS.dequant(blocks, scales), OPS.qdq(args[0]), OPS.localise(args[1], mine)]
        out += OPS.route(args[0], None, None, None, 3)
        out += prepare(experts, prefer=backend.name).tensors()
        out += [t for t in unprepare(packed).tensors().values() if t is not None]
    assert {t.device for t in out} == {args[0].device}
    for place, name in enumerate(("topk_ids", "topk_weights"), 1):
        moved = list(args)
        moved[place] = args[place].to("meta")
        with pytest.raises(ValueError, match=f"{name} must be on x's device {args[0].device}, got meta"):
            packed(*moved)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_c3_no_value_of_another_device_is_read_by_the_host(tokens: int) -> None:
    """Tensors of the meta device have no data to read. On them kernels take the way of GPUs, so what runs can be
    captured."""
    six = [t.to("meta") for t in weights(TINY).tensors().values()]
    x, ids, wts = (t.to("meta") for t in inputs(TINY.with_(tokens=tokens)))
    run = {name: kernel for name, (kernel, _) in _ops.KERNELS.items()}
    for invariant in (False, True):
        act = resolve("op", "silu", None, None, None)
        out = reference.moe(
            x,
            ids,
            wts,
            *six,
            x_scale=None,
            activation=act,
            x_format="none",
            weight_on_input=False,
            batch_invariant=invariant,
        )
        assert out.shape == (tokens, 96) and out.device.type == "meta"
    blocks, scales = run["quant"](x)
    run["dequant.out"](blocks, scales, out=run["dequant"](blocks, scales, dtype=torch.float32))
    mine = torch.arange(7, dtype=torch.int32, device="meta")
    made = [run["qdq"](x), run["localise"](ids, mine), *run["route"](x, None, None, None, 2)]
    for backend in mxfp4_ops.BACKENDS:
        packed = run["prepare_moe"](*six, layout=backend.layout.tag)
        made += run["unprepare_moe"](packed, layout=backend.layout.tag, hidden=96, intermediate=160)
    assert {t.device.type for t in made} == {"meta"}


def test_c4_tracing_leaves_no_mark(runnable: tuple[str, Backend]) -> None:
    """A module that was compiled has the attributes that it had, and decides as one that never was."""
    device, backend = runnable
    torch._dynamo.reset()
    layer = MXFP4Experts(prepare(weights(TINY, device=device), prefer=backend.name))
    before = {k: str(v) for k, v in vars(layer).items()}
    args = inputs(TINY, device=device)
    wanted = layer(*args)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(*args), wanted)
    assert {k: str(v) for k, v in vars(layer).items() if k in before} == before  # torch adds a mark of its own
    assert torch.equal(layer(*args), wanted)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake, kwargs = moe_call(layer.packed, *(mode.from_tensor(a) for a in args))
        OPS.moe(*fake, **kwargs)
    assert torch.equal(layer(*args), wanted)
