"""Every sentence that bad input of ``route``, ``pack_topk`` and ``unpack_topk`` meets, whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxfp4_ops
import pytest
import torch
from torch import Tensor

ROUTE = "mxfp4::route: "
PACK = "mxfp4_ops.pack_topk: "
METHODS = "softmax_topk, topk_softmax, sigmoid_topk, topk_sigmoid, sqrtsoftplus_topk"


def route(
    logits: Tensor | None = None,
    bias: Tensor | None = None,
    ids: Tensor | None = None,
    table: Tensor | None = None,
    top_k: int = 2,
    **options: Any,
) -> Any:
    """The op, on 2 tokens and 8 experts unless told otherwise."""
    return torch.ops.mxfp4.route(torch.zeros(2, 8) if logits is None else logits, bias, ids, table, top_k, **options)


def hashed(ids: Tensor | None = None, table: Tensor | None = None, **options: Any) -> Any:
    ids = torch.zeros(2, dtype=torch.int64) if ids is None else ids
    table = torch.zeros(5, 2, dtype=torch.int32) if table is None else table
    return route(ids=ids, table=table, method="sqrtsoftplus_topk", **options)


def grouped(**options: Any) -> Any:
    return route(method="sigmoid_topk", **options)


ONE = torch.ones(1, 2)

CASES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: route(torch.zeros(2, 8, dtype=torch.int32)), TypeError, "logits must be a float dtype, got int32."),
    (lambda: route(torch.zeros(8)), ValueError, "logits must be [T, E], got [8]."),
    (lambda: route(method="sigmoid"), ValueError, f"method must be one of {METHODS}, got 'sigmoid'."),
    (lambda: route(top_k=9), ValueError, "top_k must be between 1 and the number of experts 8, got 9."),
    (lambda: route(top_k=0), ValueError, "top_k must be between 1 and the number of experts 8, got 0."),
    (lambda: route(torch.zeros(2, 0), top_k=1), ValueError, "top_k must be between 1 and the number of experts 0, got 1."),
    (lambda: route(scale=1e39), ValueError,
     "scale must be a normal number of float32, which kernels compute in, got 1e+39."),
    (lambda: route(scale=-1e-40), ValueError,
     "scale must be a normal number of float32, which kernels compute in, got -1e-40."),
    (lambda: route(scale=float("inf")), ValueError,
     "scale must be a normal number of float32, which kernels compute in, got inf."),
    (lambda: route(scale=float("nan")), ValueError,
     "scale must be a normal number of float32, which kernels compute in, got nan."),
    # arguments that a method does not use
    (lambda: route(bias=torch.zeros(8), method="topk_softmax"), ValueError,
     "correction_bias must be None for method 'topk_softmax', which does not use it."),
    (lambda: route(bias=torch.zeros(8), method="topk_sigmoid", renormalize=False), ValueError,
     "correction_bias must be None for method 'topk_sigmoid', which does not use it."),
    (lambda: route(ids=torch.zeros(2, dtype=torch.int64)), ValueError,
     "input_ids must be None for method 'softmax_topk', which does not use it."),
    (lambda: route(table=torch.zeros(5, 2, dtype=torch.int64), method="sigmoid_topk"), ValueError,
     "hash_table must be None for method 'sigmoid_topk', which does not use it."),
    (lambda: route(groups=2, method="topk_softmax"), ValueError,
     "groups and topk_groups must be 1 for method 'topk_softmax', got 2 and 1."),
    (lambda: hashed(groups=2, topk_groups=2), ValueError,
     "groups and topk_groups must be 1 for method 'sqrtsoftplus_topk', got 2 and 2."),
    (lambda: route(method="topk_softmax", renormalize=False), ValueError,
     "renormalize must be True for method 'topk_softmax', whose weights sum to 1 by definition."),
    (lambda: route(method="topk_sigmoid"), ValueError,
     "renormalize must be False for method 'topk_sigmoid', which takes the sigmoids as they are."),
    # groups
    (lambda: grouped(groups=3), ValueError, "groups must divide the number of experts 8, got 3."),
    (lambda: grouped(groups=0), ValueError, "groups must divide the number of experts 8, got 0."),
    (lambda: grouped(groups=4, topk_groups=5), ValueError, "topk_groups must be between 1 and groups 4, got 5."),
    (lambda: grouped(topk_groups=0), ValueError, "topk_groups must be between 1 and groups 1, got 0."),
    (lambda: grouped(groups=4, topk_groups=1, top_k=3), ValueError,
     "top_k must be at most 2, the experts of topk_groups 1 groups, got 3."),
    (lambda: grouped(groups=8, topk_groups=2, bias=torch.zeros(8)), ValueError,
     "groups must leave two experts in a group where correction_bias is given, since the best two are the group's score, "
     "got 8 groups of 1."),
    # correction_bias
    (lambda: route(bias=torch.zeros(8, dtype=torch.int64)), TypeError, "correction_bias must be a float dtype, got int64."),
    (lambda: route(bias=torch.zeros(1, 8)), ValueError, "correction_bias must be [E] = [8], got [1, 8]."),
    (lambda: route(bias=torch.zeros(8, device="meta")), ValueError,
     "correction_bias must be on logits' device cpu, got meta."),
    (lambda: hashed(bias=torch.zeros(8)), ValueError,
     "correction_bias must be None where hash_table is given, which makes the choice."),
    # hash_table
    (lambda: route(ids=torch.zeros(2, dtype=torch.int64), method="sqrtsoftplus_topk"), ValueError,
     "input_ids and hash_table must be given together, got only input_ids."),
    (lambda: route(table=torch.zeros(5, 2, dtype=torch.int64), method="sqrtsoftplus_topk"), ValueError,
     "input_ids and hash_table must be given together, got only hash_table."),
    (lambda: hashed(ids=torch.zeros(2)), TypeError, "input_ids must be int32 or int64, got float32."),
    (lambda: hashed(ids=torch.zeros(3, dtype=torch.int64)), ValueError, "input_ids must be [T] = [2], got [3]."),
    (lambda: hashed(ids=torch.zeros(2, dtype=torch.int64, device="meta")), ValueError,
     "input_ids must be on logits' device cpu, got meta."),
    (lambda: hashed(table=torch.zeros(5, 2)), TypeError, "hash_table must be int32 or int64, got float32."),
    (lambda: hashed(table=torch.zeros(5, 3, dtype=torch.int64)), ValueError,
     "hash_table must be [vocabulary, top_k] with top_k = 2, got [5, 3]."),
    (lambda: hashed(table=torch.zeros(0, 2, dtype=torch.int64)), ValueError,
     "hash_table must be [vocabulary, top_k] with top_k = 2, got [0, 2]."),
    (lambda: hashed(table=torch.zeros(5, 2, dtype=torch.int64, device="meta")), ValueError,
     "hash_table must be on logits' device cpu, got meta."),
    (lambda: hashed(ids=torch.tensor([4, 5])), ValueError,
     "input_ids must be at least 0 and below the vocabulary 5 of hash_table, got 5."),
    (lambda: hashed(ids=torch.tensor([-1, 0])), ValueError,
     "input_ids must be at least 0 and below the vocabulary 5 of hash_table, got -1."),
    (lambda: hashed(table=torch.tensor([[7, 8]])), ValueError,
     "hash_table must be at least 0 and below the number of experts 8, got 8."),
    (lambda: hashed(table=torch.tensor([[7, -1]])), ValueError,
     "hash_table must be at least 0 and below the number of experts 8, got -1."),
    # pack_topk, unpack_topk
    (lambda: mxfp4_ops.pack_topk(ONE, ONE), TypeError, PACK + "topk_ids must be int32 or int64, got float32."),
    (lambda: mxfp4_ops.pack_topk(ONE.int(), ONE.int()), TypeError, PACK + "topk_weights must be a float dtype, got int32."),
    (lambda: mxfp4_ops.pack_topk(ONE.int(), ONE[0]), ValueError,
     PACK + "topk_weights must have the shape of topk_ids, [1, 2], got [2]."),
    (lambda: mxfp4_ops.pack_topk(ONE.int(), ONE.to("meta")), ValueError,
     PACK + "topk_weights must be on topk_ids' device cpu, got meta."),
    (lambda: mxfp4_ops.pack_topk(ONE.int() * 32768, ONE), ValueError,
     PACK + "topk_ids must be from -32768 to 32767 to fit into 16 bits, got 32768."),
    (lambda: mxfp4_ops.pack_topk(ONE.int() * -32769, ONE), ValueError,
     PACK + "topk_ids must be from -32768 to 32767 to fit into 16 bits, got -32769."),
    (lambda: mxfp4_ops.unpack_topk(ONE), TypeError, "mxfp4_ops.unpack_topk: packed must be int32, got float32."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), CASES, ids=[c[2][:70] for c in CASES])
def test_sentence(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == (text if text.startswith("mxfp4") else ROUTE + text)
