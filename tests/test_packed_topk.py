"""pack_topk and unpack_topk: bits by hand, rounding, signs, round trips, inside a compiled graph."""

from __future__ import annotations

import math

import pytest
import torch
from mxfp4_ops import pack_topk, route, unpack_topk


def test_bits_by_hand(device: str) -> None:
    ids = torch.tensor([[3, 0, 32767], [-1, -32768, 258]], device=device)
    weights = torch.tensor([[1.0, -2.0, 0.0], [0.5, 1.0, math.inf]], device=device)
    packed = pack_topk(ids, weights)
    assert packed.dtype is torch.int32 and packed.is_contiguous()
    want = [[0x00033F80, 0x0000C000, 0x7FFF0000], [0xFFFF3F00, 0x80003F80, 0x01027F80]]
    assert [[word & 0xFFFFFFFF for word in row] for row in packed.tolist()] == want
    found, rounded = unpack_topk(packed)
    assert torch.equal(found, ids.int()) and found.dtype is torch.int32
    assert torch.equal(rounded, weights.bfloat16()) and rounded.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_weights_round_to_nearest_even(device: str, dtype: torch.dtype) -> None:
    # bfloat16 has 7 bits behind the point: 1 + 2^-8 lies halfway to 1, 1 + 3 * 2^-8 halfway to 1 + 2^-6
    weights = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8]], dtype=dtype, device=device)
    halfway = dtype is not torch.bfloat16
    ids = torch.zeros(1, 3, dtype=torch.int32, device=device)
    packed = pack_topk(ids, weights)
    if halfway:
        assert [word & 0xFFFF for word in packed[0].tolist()] == [0x3F80, 0x3F82, 0xBF80]
    assert torch.equal(unpack_topk(packed)[1], weights.bfloat16())


def test_nan_and_every_bfloat16_survive(device: str) -> None:
    every = torch.arange(-32768, 32768, device=device).to(torch.int16).view(torch.bfloat16)[None]
    ids = torch.arange(65536, device=device)[None] - 32768
    found, weights = unpack_topk(pack_topk(ids, every))
    assert torch.equal(found, ids.int())
    assert torch.equal(weights.isnan(), every.isnan())
    assert torch.equal(weights.nan_to_num().view(torch.int16), every.nan_to_num().view(torch.int16))


def test_strided_and_empty(device: str) -> None:
    ids, weights = route(torch.randn(6, 8, device=device), 3)
    packed = pack_topk(ids, weights)
    turned = pack_topk(ids.t().contiguous().t(), weights.t().contiguous().t())
    assert torch.equal(turned, packed) and turned.is_contiguous(), "kernels take it by its pointer"
    for got, want in zip(unpack_topk(packed.t().contiguous().t()), unpack_topk(packed), strict=True):
        assert torch.equal(got, want) and got.is_contiguous()
    assert pack_topk(ids[:0], weights[:0]).shape == (0, 3)
    assert all(t.shape == (0, 3) for t in unpack_topk(packed[:0]))


def test_compiled(device: str) -> None:
    def run(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = pack_topk(*route(logits, 3, "sigmoid_topk"))
        return packed, *unpack_topk(packed)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9, 1, 0):
        logits = torch.randn(tokens, 8, device=device)
        for got, want in zip(compiled(logits), run(logits), strict=True):
            assert torch.equal(got, want)
