"""Dense experts to MXFP4: right bytes, zero error on MXFP4 values, one expert at a time, refusals by sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from mxfp4_ops import QUANT_MODES, ExpertWeights, prepare, quantize_experts, unprepare
from problems import TINY, Problem, inputs, weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OPS = torch.ops.mxfp4
DTYPES = [torch.float32, torch.bfloat16]


def dense(experts: ExpertWeights, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (
        OPS.dequant(experts.w13, experts.w13_scale, dtype=dtype),
        OPS.dequant(experts.w2, experts.w2_scale, dtype=dtype),
    )


def in_order(order: str, *stacks: Tensor) -> tuple[Tensor, ...]:
    return tuple(s if order == "out_in" else s.mT.contiguous() for s in stacks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["out_in", "in_out"])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_b2_mxfp4_values_come_back_exactly(order: str, dtype: torch.dtype, activation: str, device: str) -> None:
    """Rule B2. Scale bytes may differ where a block has small codes only; the values may not."""
    experts = weights(TINY.with_(activation=activation), device=device)
    w13, w2 = dense(experts, dtype)
    found = quantize_experts(*in_order(order, w13, w2), order=order, w13_bias=experts.w13_bias, w2_bias=experts.w2_bias)
    for wanted, back in zip((w13, w2), dense(found, dtype), strict=True):
        assert torch.equal(wanted, back)
    assert found.w13_bias is experts.w13_bias and found.w2_bias is experts.w2_bias
    packed = prepare(found, activation=activation)
    x, ids, routing = inputs(TINY, device=device)
    assert torch.equal(packed(x, ids, routing), prepare(experts, activation=activation)(x, ids, routing))
    assert torch.equal(unprepare(packed).w13, found.w13)


@pytest.mark.parametrize("rule", ["even", "ceil", "mse", "gguf"])
def test_b2_every_expert_is_quant_of_its_matrix(rule: str, device: str) -> None:
    g = torch.Generator().manual_seed(4)
    w13, w2 = torch.randn(3, 128, 96, generator=g).to(device), torch.randn(3, 96, 64, generator=g).to(device)
    found = quantize_experts(w13, w2, order="out_in", scale_rule=rule)
    listed = quantize_experts(list(w13.mT), tuple(w2.mT), order="in_out", scale_rule=rule)
    for stack, codes, scales in ((w13, "w13", "w13_scale"), (w2, "w2", "w2_scale")):
        blocks, bytes_ = OPS.quant(stack, scale_rule=rule)
        for experts in (found, listed):
            assert torch.equal(getattr(experts, codes), blocks) and torch.equal(getattr(experts, scales), bytes_)
    assert found.w13_bias is None and found.w2_bias is None


def test_parameters_of_a_module_are_taken() -> None:
    w13, w2 = (torch.nn.Parameter(torch.randn(shape)) for shape in ((2, 64, 32), (2, 32, 32)))
    assert not quantize_experts(w13, w2, order="out_in").w13.requires_grad


class Largest(TorchDispatchMode):
    """The bytes of the largest storage that an op made, leaves of the package included."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in old]
        self.bytes = max([self.bytes, *(t.untyped_storage().nbytes() for t in made)])
        return out


@pytest.mark.parametrize("order", ["out_in", "in_out"])
@pytest.mark.parametrize("rule", ["even", "mse"])
def test_nothing_larger_than_the_result_or_one_expert_is_made(order: str, rule: str) -> None:
    """Rule M1: no copy of the whole stack, whatever the order is."""
    experts, rows, hidden = 40, 64, 64
    w13, w2 = in_order(order, torch.randn(experts, rows, hidden), torch.randn(experts, hidden, rows))
    with Largest() as largest:
        quantize_experts(w13, w2, order=order, scale_rule=rule)
    result, one = experts * rows * hidden // 2, rows * hidden * 8  # float64 of one expert
    assert result // 2 <= largest.bytes <= max(result, one) < w13.nbytes // 4


class OnRequest(Sequence[Tensor]):
    """Matrices that exist while somebody holds them."""

    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        self.count, self.shape, self.asked = count, shape, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(index)
        return torch.full(self.shape, float(index + 1))

    def __iter__(self) -> Iterator[Tensor]:
        raise AssertionError("taken as a whole")


def test_a_sequence_is_asked_expert_by_expert() -> None:
    w13, w2 = OnRequest(5, (64, 32)), OnRequest(5, (32, 32))
    found = quantize_experts(w13, w2, order="out_in")
    for sequence in (w13, w2):
        assert sorted(set(sequence.asked)) == [0, 1, 2, 3, 4] and sequence.asked == sorted(sequence.asked)
    assert dense(found)[0][:, 0, 0].tolist() == [1, 2, 3, 4, 4]  # 5 is a tie


def call(**changes: Any) -> Callable[[], ExpertWeights]:
    arguments = {"w13": torch.zeros(2, 128, 96), "w2": torch.zeros(2, 96, 64), "order": "out_in"} | changes
    return lambda: quantize_experts(**arguments)


OP = "mxfp4_ops.quantize_experts: "
SENTENCES = [
    (call(order="row"), ValueError, "order must be one of out_in, in_out, got 'row'."),
    (call(scale_rule="up"), ValueError, f"scale_rule must be one of {', '.join(QUANT_MODES)}, got 'up'."),
    (call(w13=[], w2=[]), ValueError, "w13 must hold at least one expert, got none."),
    (call(w2=torch.zeros(3, 96, 64)), ValueError, "w2 must hold as many experts as w13, 2, got 3."),
    (call(w13=torch.zeros(2, 96)), ValueError, "w13 must hold a matrix [OUT, IN] for each expert, got [96]."),
    (call(w2=torch.zeros(2, 96), order="in_out"), ValueError,
     "w2 must hold a matrix [IN, OUT] for each expert, got [96]."),
    (call(w13=torch.zeros(2, 128, 96, dtype=torch.float64)), TypeError,
     "w13 must be float32, bfloat16 or float16, got float64."),
    (call(w13=torch.zeros(2, 128, 48)), ValueError, "hidden (IN of w13) must be a positive multiple of 32, got 48."),
    (call(w2=torch.zeros(2, 96, 48)), ValueError, "intermediate (IN of w2) must be a positive multiple of 32, got 48."),
    (call(w13=torch.zeros(2, 96, 96)), ValueError, "w13 must have I = 64 or 2 I = 128 as OUT, got 96."),
    (call(w2=torch.zeros(2, 32, 64)), ValueError, "w2 must have H = 96, the IN of w13, as OUT, got 32."),
    (call(w13_bias=torch.zeros(2, 64)), ValueError, "w13_bias must be [E, OUT] = [2, 128], got [2, 64]."),
    (call(w2_bias=torch.zeros(96)), ValueError, "w2_bias must be [E, OUT] = [2, 96], got [96]."),
    (call(w2_bias=torch.zeros(2, 96, dtype=torch.int32)), TypeError, "w2_bias must be a float dtype, got int32."),
    (call(w13=[torch.zeros(128, 96), torch.zeros(64, 96)]), ValueError,
     "w13 must have the shape of expert 0, (OUT, IN) = (128, 96), in all experts, got (64, 96) in expert 1."),
    # a fuzzer found these
    (call(w13=None), TypeError, "w13 must be a tensor [E, ...] or a sequence of matrices, got NoneType."),
    (call(w2=torch.zeros(())), TypeError, "w2 must be a tensor [E, ...] or a sequence of matrices, got a scalar."),
    (call(w2=[None, None]), TypeError, "w2 must be a tensor, got None."),
    (call(w2_bias="bias"), TypeError, "w2_bias must be a tensor, got str."),
    (call(w2=torch.zeros(2, 96, 64, device="meta")), ValueError,
     "w2 must be on the device of w13's expert 0, cpu, got meta."),
    (call(w13=[torch.zeros(128, 96), torch.zeros(128, 96, device="meta")]), ValueError,
     "w13 must be on the device of w13's expert 0, cpu, got meta."),
    (call(w13_bias=torch.zeros(2, 128, device="meta")), ValueError,
     "w13_bias must be on the device of w13's expert 0, cpu, got meta."),
]  # fmt: skip


@pytest.mark.parametrize(("run", "kind", "text"), SENTENCES, ids=[s[2][:60] for s in SENTENCES])
def test_sentence(run: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        run()
    assert str(caught.value) == OP + text


def test_interleaved_rows_keep_their_order() -> None:
    """gpt-oss: gate and up rows in turn go in, come out so, and prepare is told."""
    problem: Problem = TINY.with_(activation="swigluoai")
    experts = weights(problem)
    w13, w2 = dense(experts)
    turned = torch.stack(w13.chunk(2, 1), 2).flatten(1, 2)
    found = quantize_experts(turned, w2, order="out_in", w13_bias=None, w2_bias=experts.w2_bias)
    assert torch.equal(dense(found)[0], turned)
    plain = quantize_experts(w13, w2, order="out_in", w2_bias=experts.w2_bias)
    x, ids, routing = inputs(problem)
    wanted = prepare(plain, activation="swigluoai")(x, ids, routing)
    assert torch.equal(prepare(found, activation="swigluoai", interleaved=True)(x, ids, routing), wanted)
