"""``route`` inside torch.compile and torch.export, with every tensor that it takes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from mxfp4_ops import route
from torch import Tensor
from torch._dynamo.testing import CompileCounter

EXPERTS, TOP_K = 24, 3


class Router(torch.nn.Module):
    """A linear layer and ``route``."""

    def __init__(self, options: dict[str, Any], *, biased: bool = False, hashed: bool = False) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(5)
        self.options, self.hashed = options, hashed
        self.register_buffer("weight", torch.randn(EXPERTS, 16, generator=g))
        self.register_buffer("bias", torch.rand(EXPERTS, generator=g) if biased else None)
        self.register_buffer("table", torch.randint(EXPERTS, (11, TOP_K), generator=g) if hashed else None)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ids = tokens if self.hashed else None
        return route(
            x @ self.weight.t(),
            TOP_K,
            correction_bias=self.bias,
            input_ids=ids,
            hash_table=self.table,
            **self.options,
        )


def routers() -> list[Router]:
    return [
        Router({"renormalize": False, "groups": 4, "topk_groups": 2}),
        Router({"method": "sigmoid_topk", "groups": 4, "topk_groups": 2, "scale": 2.5}, biased=True),
        Router({"method": "sqrtsoftplus_topk"}, hashed=True),
    ]


def inputs(tokens: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, 16, device=device), torch.arange(tokens, device=device) % 11


@pytest.mark.parametrize("which", range(3))
def test_one_graph_for_every_number_of_tokens(device: str, which: int) -> None:
    torch._dynamo.reset()
    router = routers()[which].to(device)
    counter = CompileCounter()
    compiled = torch.compile(router, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (64, 2, 5, 1, 9, 0):
        args = inputs(tokens, device)
        for got, want in zip(compiled(*args), router(*args), strict=True):
            assert torch.equal(got, want)
    assert counter.frame_count <= 3  # the general one, T = 1, T = 0


@pytest.mark.parametrize("which", range(3))
def test_export_round_trip(device: str, which: int) -> None:
    router = routers()[which].to(device)
    tokens = torch.export.Dim("T", min=1, max=4096)
    shapes = {"x": {0: tokens}, "tokens": {0: tokens}}
    program = torch.export.export(router, inputs(5, device), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for count in (64, 1, 3):
        args = inputs(count, device)
        for got, want in zip(loaded(*args), router(*args), strict=True):
            assert torch.equal(got, want)


if torch.cuda.is_available():  # no skip to be counted where there is no GPU

    @pytest.mark.parametrize("which", range(3))
    def test_cuda_graph_replays_with_new_values(which: int) -> None:
        router = routers()[which].to("cuda")
        static, fresh = inputs(8, "cuda"), inputs(8, "cuda")
        router(*static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = router(*static)
        for held, new in zip(static, fresh, strict=True):
            held.copy_(new)
        graph.replay()
        for got, want in zip(out, router(*fresh), strict=True):
            assert torch.equal(got, want)
