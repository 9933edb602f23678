"""Sentences about tensors as such: absent ones, what is read as one block, and what is overwritten."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mxfp4_ops import PackedExperts, prepare
from problems import TINY, inputs, weights
from torch import Tensor

OPS = torch.ops.mxfp4
TAG = "native_cpu.tile32.v1"


def gaps(t: Tensor) -> Tensor:
    """The same values with gaps between them."""
    return torch.stack((t, t), -1)[..., 0]


def call(name: str) -> Tensor:
    """The layer with one packed tensor strided."""
    packed = prepare(weights(TINY), prefer="native_cpu")
    return dataclasses.replace(packed, **{name: gaps(getattr(packed, name))})(*inputs(TINY))


def repack(packed: PackedExperts, name: str) -> None:
    """Overwrite an expert of a stack that is one expert, expanded."""
    held = dataclasses.replace(packed, **{name: getattr(packed, name)[:1].expand_as(getattr(packed, name))})
    OPS.repack_expert(held.tensors(), 0, *[t[0] for t in weights(TINY).tensors().values()], layout=packed.layout)


def absent(name: str, layout: str = "native_cpu") -> Tensor:
    """The layer with one tensor None, which torch takes for a Tensor of a schema."""
    packed = prepare(weights(TINY), prefer=layout)
    args = dict(zip(("x", "topk_ids", "topk_weights"), inputs(TINY), strict=True))
    if name in args:
        return packed(**{**args, name: None})
    return dataclasses.replace(packed, **{name: None})(*args.values())


def prepare_without(name: str) -> list[Tensor]:
    return OPS.prepare_moe(**{**weights(TINY).tensors(), name: None}, layout="canonical")


REPACK = "mxfp4::repack_expert: "
ONCE = "Call .contiguous() on it once, where weights are loaded."
CASES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *((lambda n=n: absent(n), TypeError, f"mxfp4::moe: {n} must be a tensor, got None.")
      for n in ("x", "topk_ids", "topk_weights", "w13", "w13_scale", "w2")),
    (lambda: absent("w2_scale", "reference"), TypeError, "mxfp4::moe: w2_scale must be a tensor, got None."),
    (lambda: prepare_without("w13_scale"), TypeError, "mxfp4::prepare_moe: w13_scale must be a tensor, got None."),
    (lambda: prepare_without("w2"), TypeError, "mxfp4::prepare_moe: w2 must be a tensor, got None."),
    (lambda: OPS.quant(None), TypeError, "mxfp4::quant: x must be a tensor, got None."),
    (lambda: OPS.dequant(torch.zeros(16, dtype=torch.uint8), None), TypeError,
     "mxfp4::dequant: scales must be a tensor, got None."),
    (lambda: OPS.localise(torch.zeros(2, 2, dtype=torch.int32), None), TypeError,
     "mxfp4::localise: expert_ids must be a tensor, got None."),
    (lambda: OPS.route(None, None, None, None, 2), TypeError, "mxfp4::route: logits must be a tensor, got None."),
    (lambda: call("w13"), ValueError,
     f"mxfp4::moe: w13 must be contiguous, got strides [52224, 4352, 2176, 2]. {ONCE}"),
    (lambda: call("w2_bias"), ValueError, f"mxfp4::moe: w2_bias must be contiguous, got strides [256, 2]. {ONCE}"),
    (lambda: repack(prepare(weights(TINY), prefer="native_cpu"), "w2"), ValueError,
     f"{REPACK}w2 must be contiguous, got strides [0, 3264, 1088, 1]. {ONCE}"),
    (lambda: repack(prepare(weights(TINY), prefer="reference"), "w2_scale"), ValueError,
     f"{REPACK}w2_scale in packed must be contiguous, got strides [0, 5, 1]. It is overwritten in place."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), CASES, ids=[c[2][:70] for c in CASES])
def test_sentence(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text
