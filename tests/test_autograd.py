"""No gradient exists yet: asking for one raises and names the op, never a quiet None."""

from __future__ import annotations

import pytest
import torch
from mxfp4_ops import prepare
from mxfp4_ops.backends import Backend
from problems import TINY, inputs, weights
from torch import Tensor

OPS = torch.ops.mxfp4


@pytest.mark.parametrize("which", ["x", "topk_weights", "w13_bias"])
@pytest.mark.parametrize("compiled", [False, True])
def test_moe(runnable: tuple[str, Backend], which: str, compiled: bool) -> None:
    device, backend = runnable
    packed = prepare(weights(TINY, device=device), prefer=backend.name)
    x, ids, routing = inputs(TINY, torch.float32, device=device)
    {"x": x, "topk_weights": routing, "w13_bias": packed.w13_bias}[which].requires_grad_()
    run = torch.compile(packed.__call__, fullgraph=True, backend="aot_eager") if compiled else packed
    with pytest.raises(Exception, match="mxfp4::moe: backward is not implemented"):
        run(x, ids, routing).sum().backward()


def test_qdq_route_and_prepare(device: str) -> None:
    x = torch.randn(2, 64, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="mxfp4::qdq: backward is not implemented"):
        OPS.qdq(x).sum().backward()
    with pytest.raises(NotImplementedError, match="mxfp4::route: backward is not implemented"):
        OPS.route(x, None, None, None, 2)[1].sum().backward()
    six = list(weights(TINY, device=device).tensors().values())
    six[2] = six[2].float().requires_grad_()
    with pytest.raises(NotImplementedError, match="mxfp4::prepare_moe: backward is not implemented"):
        OPS.prepare_moe(*six, layout="canonical")[2].sum().backward()


def test_quant_gives_bytes_that_need_no_gradient(device: str) -> None:
    x = torch.randn(2, 64, device=device, requires_grad=True)
    assert not any(t.requires_grad for t in OPS.quant(x))


def test_repacking_under_a_gradient_is_refused() -> None:
    packed = prepare(weights(TINY), prefer="reference").tensors()
    packed[2].requires_grad_()
    one: list[Tensor | None] = [None if t is None else t[0] for t in weights(TINY).tensors().values()]
    with pytest.raises(ValueError, match="w13_bias in packed must not require a gradient"):
        OPS.repack_expert(packed, 0, *one, layout="canonical")
