"""Inside torch.compile, torch.export and AOT tracing: no break, few graphs, the same numbers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from mxfp4_ops import BACKENDS, Activation, MXFP4Experts, PackedExperts, prepare
from mxfp4_ops.backends import Backend
from problems import Problem, inputs, weights
from torch import Tensor
from torch._dynamo.testing import CompileCounter

OPS = torch.ops.mxfp4
# No size equals a number of tokens of the list, so that no symbol can be mistaken for another.
PROBLEM = Problem("compile", 7, 96, 160, 4, 64, activation="swigluoai")
TOKENS = (64, 2, 3, 5, 1, 8, 0)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def module(runnable: tuple[str, Backend]) -> MXFP4Experts:
    device, backend = runnable
    packed = prepare(
        weights(PROBLEM, device=device), activation=Activation("swigluoai", limit=7.0), prefer=backend.name
    )
    return MXFP4Experts(packed)


def tokens(count: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    x, ids, routing = inputs(PROBLEM, device=device)
    # Clones: dynamo guards on the sizes of a view's base, which a slice of one buffer would bring in.
    return x[:count].clone(), ids[:count].clone(), routing[:count].clone()


class Layer(torch.nn.Module):
    """A router and its experts, as models have them."""

    def __init__(self, experts: MXFP4Experts) -> None:
        super().__init__()
        self.experts = experts
        self.register_buffer(
            "gate", torch.randn(PROBLEM.experts, PROBLEM.hidden, generator=torch.Generator().manual_seed(7))
        )

    def forward(self, x: Tensor) -> Tensor:
        ids, routing = OPS.route(x.float() @ self.gate.t(), None, None, None, PROBLEM.top_k)
        return x + self.experts(x * 2, ids, routing)


def test_c2_one_graph_for_every_number_of_tokens(runnable: tuple[str, Backend]) -> None:
    device, _ = runnable
    layer = Layer(module(runnable)).to(device)
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for count in TOKENS:
        x = tokens(count, device)[0]
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count <= 3  # the general one, T = 1, T = 0


def test_inductor_gives_the_eager_bits(runnable: tuple[str, Backend]) -> None:
    device, _ = runnable
    experts = module(runnable)
    compiled = torch.compile(experts, fullgraph=True, dynamic=True)
    for count in TOKENS:
        args = tokens(count, device)
        assert torch.equal(compiled(*args), experts(*args))


def test_c2_no_graph_for_another_layer(runnable: tuple[str, Backend]) -> None:
    """Layers of the same shape share one graph: neither a name nor an object of theirs is in it."""
    device, _ = runnable
    layers = [module(runnable) for _ in range(4)]
    counter = CompileCounter()
    run = torch.compile(lambda layer, *args: layer(*args), fullgraph=True, dynamic=True, backend=counter)
    for layer in layers:
        run(layer, *tokens(5, device))
    assert counter.frame_count == 1


def test_packed_experts_as_an_argument(runnable: tuple[str, Backend]) -> None:
    device, _ = runnable
    packed = module(runnable).packed

    def run(experts: PackedExperts, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return experts(x, ids, routing)

    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for count in TOKENS:
        args = tokens(count, device)
        assert torch.equal(compiled(packed, *args), packed(*args))
    assert counter.frame_count <= 3


def test_the_graph_holds_one_op(runnable: tuple[str, Backend]) -> None:
    device, backend = runnable
    seen: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    torch.compile(module(runnable), fullgraph=True, backend=keep)(*tokens(5, device))
    calls = [n for n in seen[0].graph.nodes if n.op == "call_function" and "mxfp4" in str(n.target)]
    assert len(calls) == 1 and calls[0].kwargs["layout"] == backend.layout.tag


def test_export_round_trip(runnable: tuple[str, Backend]) -> None:
    device, _ = runnable
    layer = Layer(module(runnable)).to(device)
    dynamic = {"x": {0: torch.export.Dim("T", min=1, max=4096)}}
    program = torch.export.export(layer, (tokens(5, device)[0],), dynamic_shapes=dynamic)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for count in (64, 1, 3):
        x = tokens(count, device)[0]
        assert torch.equal(loaded(x), layer(x))
    assert any("mxfp4.moe" in str(n.target) for n in program.graph.nodes)


def test_preparation_ops_compile(runnable: tuple[str, Backend]) -> None:
    device, backend = runnable
    six = tuple(weights(PROBLEM, device=device).tensors().values())
    options = {"layout": backend.layout.tag, "activation": "swigluoai"}

    def repack(packed: list[Tensor], *one: Tensor) -> list[Tensor]:
        OPS.repack_expert(packed, 2, *one, **options)
        return OPS.unprepare_moe(packed, layout=backend.layout.tag, hidden=96, intermediate=160)

    packed = OPS.prepare_moe(*six, **options)
    one = [t[5] for t in six if t is not None]
    pointers = [t.data_ptr() for t in packed]
    out = torch.compile(repack, fullgraph=True)(packed, *one)
    assert [t.data_ptr() for t in packed] == pointers
    assert all(torch.equal(o[2], t[5]) for o, t in zip(out, six, strict=True) if t is not None)
    made = torch.compile(lambda *w: OPS.prepare_moe(*w, **options), fullgraph=True)(*six)
    assert all(torch.equal(a, b) for a, b in zip(made, OPS.prepare_moe(*six, **options), strict=True))


@pytest.mark.parametrize("shape", [(3, 64), (64, 3, 96)])
def test_quant_compiles(device: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device)
    compiled = torch.compile(lambda t: OPS.dequant(*OPS.quant(t + 1)) + OPS.qdq_mxfp4(t), fullgraph=True)
    assert torch.equal(compiled(x), OPS.dequant(*OPS.quant(x + 1)) + OPS.qdq(x))


def test_a_wrong_argument_is_named_while_tracing(runnable: tuple[str, Backend]) -> None:
    device, _ = runnable
    layer = module(runnable)
    x, ids, routing = tokens(5, device)
    with pytest.raises(Exception, match=r"x must be \[T, H\] with H = hidden = 96"):
        torch.compile(layer.packed, fullgraph=True)(x[:, :64], ids, routing)


if torch.cuda.is_available():  # no skip to be counted where there is no GPU

    def test_c3_cuda_graph_replays_with_new_values() -> None:
        backend = next(b for b in BACKENDS if b.name == "reference")
        layer = module(("cuda", backend))
        static = tokens(8, "cuda")
        layer(*static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(*static)
        fresh = inputs(PROBLEM, seed=9, device="cuda")
        for held, new in zip(static, fresh, strict=True):
            held.copy_(new[:8])
        graph.replay()
        assert torch.equal(out, copy.deepcopy(layer)(*static))
