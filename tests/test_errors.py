"""Every sentence that bad input meets, whole. A changed word shows here, so that it is changed on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mxfp4_ops import (
    QUANT_MODES,
    Activation,
    ExpertWeights,
    MoEProblem,
    PackedExperts,
    Unsupported,
    prepare,
    problem_of,
    repack_expert,
    unprepare,
)
from mxfp4_ops.backends import native_cpu
from mxfp4_ops.call_plan import plan_call
from problems import TINY, inputs, weights
from torch import Tensor

OPS = torch.ops.mxfp4
SIX = ("w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias")
PLACES = {name: i for i, name in enumerate(("x", "topk_ids", "topk_weights", *SIX, "aux", "expert_ids", "x_scale"))}


def moe(**changes: Any) -> Tensor:
    """``torch.ops.mxfp4.moe`` on canonical weights, with some arguments changed."""
    w = weights(TINY).tensors()
    args: list[Any] = [*inputs(TINY), *w.values(), [], None, None]
    options = {"layout": "canonical", "hidden": 96, "intermediate": 160}
    for name, value in changes.items():
        if name in PLACES:
            args[PLACES[name]] = value
        else:
            options[name] = value
    return OPS.moe(*args, **options)


def prepare_op(**changes: Any) -> Any:
    six = {**weights(TINY).tensors(), **{k: v for k, v in changes.items() if k in SIX}}
    options = {"layout": "canonical", **{k: v for k, v in changes.items() if k not in SIX}}
    return OPS.prepare_moe(*six.values(), **options)


def repack(expert: int = 0, packed: list[Tensor] | None = None, **changes: Any) -> None:
    held = OPS.prepare_moe(*weights(TINY).tensors().values(), layout="canonical") if packed is None else packed
    six = {n: None if t is None else t[0] for n, t in weights(TINY).tensors().items()} | changes
    OPS.repack_expert(held, expert, *six.values(), layout="canonical")


def packed() -> PackedExperts:
    return prepare(weights(TINY), prefer="reference")


def byte(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


MOE = "mxfp4::moe: "
PREPARE = "mxfp4::prepare_moe: "
ACTIVATIONS = (
    "silu, swigluoai, swiglustep, situ, gelu, gelu_tanh, relu2_no_mul, silu_no_mul, gelu_no_mul, gelu_tanh_no_mul"
)

Case = tuple[Callable[[], Any], type[Exception], str]
CASES: list[Case] = [
    # quant, qdq, dequant
    (lambda: OPS.quant(torch.zeros(4, 48)), ValueError,
     "mxfp4::quant: the last dimension of x must be a multiple of 32, got 48."),
    (lambda: OPS.qdq(torch.zeros(4, 48)), ValueError,
     "mxfp4::qdq: the last dimension of x must be a multiple of 32, got 48."),
    (lambda: OPS.quant(torch.tensor(1.0)), ValueError,
     "mxfp4::quant: x must have at least one dimension, got a scalar."),
    (lambda: OPS.quant(torch.zeros(32, dtype=torch.float64)), TypeError,
     "mxfp4::quant: x must be float32 or bfloat16 or float16, got float64."),
    (lambda: OPS.qdq(torch.zeros(32, dtype=torch.int32)), TypeError,
     "mxfp4::qdq: x must be float32 or bfloat16 or float16, got int32."),
    (lambda: OPS.qdq(torch.zeros(32), scale_rule="up"), ValueError,
     f"mxfp4::qdq: scale_rule must be one of {', '.join(QUANT_MODES)}, got 'up'."),
    (lambda: OPS.qdq_mxfp4(torch.zeros(32), "up"), ValueError,
     f"mxfp4::qdq_mxfp4: scale_calculation_mode must be one of {', '.join(QUANT_MODES)}, got 'up'."),
    (lambda: OPS.dequant(byte(4, 32), byte(4, 3)), ValueError,
     "mxfp4::dequant: scales must be [..., n/32] = [4, 2], got [4, 3]. blocks hold n = 64 elements, and one scale covers 32."),
    (lambda: OPS.dequant(byte(4, 24), byte(4, 1)), ValueError,
     "mxfp4::dequant: the last dimension of blocks must hold a multiple of 32 elements, got 48."),
    (lambda: OPS.dequant(byte(4, 16), byte(4, 1).float()), TypeError,
     "mxfp4::dequant: scales must be uint8 or float8_e8m0fnu, got float32."),
    (lambda: OPS.dequant(byte(4, 16).to(torch.int32), byte(4, 1)), TypeError,
     "mxfp4::dequant: blocks must be uint8 or float4_e2m1fn_x2, got int32."),
    (lambda: OPS.dequant(byte(4, 16), byte(4, 1), dtype=torch.float64), TypeError,
     "mxfp4::dequant: dtype must be float32, bfloat16 or float16, got float64."),
    (lambda: OPS.dequant(byte(), byte()), ValueError,
     "mxfp4::dequant: blocks must have at least one dimension, got a scalar."),
    (lambda: OPS.dequant(byte(4, 16), byte(4, 1).to("meta")), ValueError,
     "mxfp4::dequant: scales must be on x's device cpu, got meta."),
    # moe: inputs
    (lambda: moe(x=torch.zeros(5, 64)), ValueError,
     MOE + "x must be [T, H] with H = hidden = 96, got [5, 64]."),
    (lambda: moe(x=torch.zeros(96)), ValueError,
     MOE + "x must be [T, H] with H = hidden = 96, got [96]."),
    (lambda: moe(x=torch.zeros(5, 96, dtype=torch.float64)), TypeError,
     MOE + "x must be float32 or bfloat16 or float16, got float64."),
    (lambda: moe(topk_ids=torch.zeros(5, 4)), TypeError,
     MOE + "topk_ids must be int32 or int64, got float32."),
    (lambda: moe(topk_ids=byte(5, 4)), TypeError,
     MOE + "topk_ids must be int32 or int64, got uint8."),
    (lambda: moe(topk_ids=torch.zeros(4, 4, dtype=torch.int32)), ValueError,
     MOE + "topk_ids must be [T, K] with T = 5 as in x, got [4, 4]."),
    (lambda: moe(topk_ids=torch.zeros(5, dtype=torch.int32)), ValueError,
     MOE + "topk_ids must be [T, K], got [5]."),
    (lambda: moe(topk_ids=torch.zeros(5, 4, dtype=torch.int32, device="meta")), ValueError,
     MOE + "topk_ids must be on x's device cpu, got meta."),
    (lambda: moe(topk_weights=torch.zeros(5, 3)), ValueError,
     MOE + "topk_weights must have the K = 4 of topk_ids, got [5, 3]."),
    (lambda: moe(topk_weights=torch.zeros(5, 4, dtype=torch.int32)), TypeError,
     MOE + "topk_weights must be a float dtype, got int32."),
    (lambda: moe(topk_ids=torch.zeros(5, 0, dtype=torch.int32), topk_weights=torch.zeros(5, 0)), ValueError,
     MOE + "topk_ids must have at least one column, got [5, 0]."),
    (lambda: moe(topk_ids=torch.full((5, 4), 7)), ValueError,
     MOE + "topk_ids must be below the number of experts E = 7, got 7."),
    (lambda: moe(topk_ids=torch.full((5, 4), -2)), ValueError,
     MOE + "topk_ids must be -1 (skip) or an expert, got -2."),
    (lambda: moe(expert_ids=torch.arange(6, dtype=torch.int32)), ValueError,
     MOE + "expert_ids must name one expert for each of the 7 in w13, got 6."),
    (lambda: moe(expert_ids=torch.arange(7)), TypeError,
     MOE + "expert_ids must be int32, got int64."),
    (lambda: moe(expert_ids=torch.zeros(7, dtype=torch.int32)), ValueError,
     MOE + "expert_ids must not repeat, got 0 more than once."),
    (lambda: moe(expert_ids=torch.arange(-1, 6, dtype=torch.int32)), ValueError,
     MOE + "expert_ids must be expert numbers from 0 on, got -1."),
    (lambda: moe(topk_ids=torch.full((5, 4), -5), expert_ids=torch.arange(7, dtype=torch.int32)), ValueError,
     MOE + "topk_ids must be -1 (skip) or an expert, got -5."),
    (lambda: OPS.localise(torch.zeros(2, 2, dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)), ValueError,
     "mxfp4::localise: expert_ids must not repeat, got 1 more than once."),
    (lambda: OPS.localise(torch.full((2, 2), -3), torch.arange(2, dtype=torch.int32)), ValueError,
     "mxfp4::localise: topk_ids must be -1 (skip) or an expert, got -3."),
    (lambda: OPS.localise(torch.zeros(2, 2), torch.arange(2, dtype=torch.int32)), TypeError,
     "mxfp4::localise: topk_ids must be int32 or int64, got float32."),
    (lambda: OPS.localise(torch.zeros(2, 2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)), ValueError,
     "mxfp4::localise: expert_ids must be [E], got [1, 2]."),
    # moe: options
    (lambda: moe(layout="triton.hoper.v1"), ValueError,
     MOE + "layout must be one of native_cpu.tile32.v1, canonical, got 'triton.hoper.v1'. Weights are packed by "
     "mxfp4_ops.prepare(); pass the layout it returned."),
    (lambda: moe(activation="swish"), ValueError,
     MOE + f"activation must be one of {ACTIVATIONS}, got 'swish'."),
    (lambda: moe(alpha=1.7), ValueError,
     MOE + "alpha must be None for activation 'silu', which does not use it, got 1.7."),
    (lambda: moe(activation="gelu", limit=7.0), ValueError,
     MOE + "limit must be None for activation 'gelu', which does not use it, got 7.0."),
    (lambda: moe(activation="situ", limit=7.0), ValueError,
     MOE + "limit must be None for activation 'situ', which does not use it, got 7.0."),
    (lambda: moe(limit=-7.0), ValueError,
     MOE + "limit must be a positive number for activation 'silu', got -7.0."),
    (lambda: moe(limit=float("nan")), ValueError,
     MOE + "limit must be a positive number for activation 'silu', got nan."),
    (lambda: moe(activation="swigluoai", alpha=float("inf")), ValueError,
     MOE + "alpha must be a finite number for activation 'swigluoai', got inf."),
    (lambda: moe(activation="situ", beta=1e39), ValueError,
     MOE + "beta must be a normal number of float32, which kernels compute in, got 1e+39."),
    (lambda: moe(limit=1e-40), ValueError,
     MOE + "limit must be a normal number of float32, which kernels compute in, got 1e-40."),
    (lambda: moe(activation="situ", alpha=0.0), ValueError,
     MOE + "alpha must be a positive number for activation 'situ', got 0.0."),
    (lambda: moe(aux=[torch.ones(7)]), ValueError,
     MOE + "aux must hold 0 tensors (none here), got 1."),
    (lambda: moe(hidden=48), ValueError,
     MOE + "hidden must be a positive multiple of 32, got 48."),
    (lambda: moe(intermediate=48), ValueError,
     MOE + "intermediate must be a positive multiple of 32, got 48."),
    # moe: weights
    (lambda: moe(w13_scale=byte(7, 320, 6)), ValueError,
     MOE + "w13_scale must be [E, S*I, H/32] = [7, 320, 3], got [7, 320, 6]. One scale covers 32 elements, not 16: is this an "
     "NVFP4 checkpoint?"),
    (lambda: moe(w2_scale=byte(7, 96, 4)), ValueError,
     MOE + "w2_scale must be [E, H, I/32] = [7, 96, 5], got [7, 96, 4]."),
    (lambda: moe(w13=byte(7, 160, 48)), ValueError,
     MOE + "w13 must be [E, S*I, H/2] = [7, 320, 48], got [7, 160, 48]. S*I rows are two halves, gate rows then up rows."),
    (lambda: moe(activation="relu2_no_mul"), ValueError,
     MOE + "w13 must be [E, S*I, H/2] = [7, 160, 48], got [7, 320, 48]. S*I rows are one half, since the "
     "activation is not gated."),
    (lambda: moe(w2=byte(6, 96, 80)), ValueError,
     MOE + "w2 must be [E, H, I/2] = [7, 96, 80], got [6, 96, 80]."),
    (lambda: moe(w2=torch.zeros(7, 96, 80)), TypeError,
     MOE + "w2 must be uint8 or float4_e2m1fn_x2, got float32."),
    (lambda: moe(w2_scale=torch.zeros(7, 96, 5, dtype=torch.bfloat16)), TypeError,
     MOE + "w2_scale must be uint8 or float8_e8m0fnu, got bfloat16."),
    (lambda: moe(w13_bias=torch.zeros(7, 160)), ValueError,
     MOE + "w13_bias must be [E, S*I] = [7, 320], got [7, 160]. S*I rows are two halves, gate rows then up rows."),
    (lambda: moe(w2_bias=torch.zeros(7, 96, dtype=torch.int32)), TypeError,
     MOE + "w2_bias must be a float dtype, got int32."),
    (lambda: moe(w2=byte(7, 96, 80).to("meta")), ValueError,
     MOE + "w2 must be on x's device cpu, got meta."),
    (lambda: moe(layout="native_cpu.tile32.v1"), ValueError,
     MOE + "w13 must be packed as layout 'native_cpu.tile32.v1' needs it, = [7, 12, 2, 1088], got [7, 320, 48]. Were the weights "
     "packed for other sizes or by another layout?"),
    # prepare_moe, unprepare_moe, repack_expert
    (lambda: prepare_op(w13=byte(7, 320, 24)), ValueError,
     PREPARE + "hidden (twice the last dimension of w13) must be a positive multiple of 32, got 48."),
    (lambda: prepare_op(w2=byte(7, 96, 0)), ValueError,
     PREPARE + "intermediate (twice the last dimension of w2) must be a positive multiple of 32, got 0."),
    (lambda: prepare_op(w13=byte(320, 48)), ValueError,
     PREPARE + "w13 must be [E, S*I, H/2], got [320, 48]."),
    (lambda: prepare_op(w13_scale=byte(7, 320, 6)), ValueError,
     PREPARE + "w13_scale must be [E, S*I, H/32] = [7, 320, 3], got [7, 320, 6]. One scale covers 32 elements, not 16: is this an "
     "NVFP4 checkpoint?"),
    (lambda: prepare_op(layout="nope"), ValueError,
     PREPARE + "layout must be one of native_cpu.tile32.v1, canonical, got 'nope'. Weights are packed by mxfp4_ops.prepare(); "
     "pass the layout it returned."),
    (lambda: prepare_op(activation="silu_no_mul", interleaved=True), ValueError,
     PREPARE + "interleaved must be False for an activation without a gate, got True."),
    (lambda: OPS.unprepare_moe(packed().tensors()[:5], layout="canonical", hidden=96, intermediate=160), ValueError,
     "mxfp4::unprepare_moe: packed must hold 6 tensors (w13, w13_scale, w13_bias, w2, w2_scale, w2_bias), got 5."),
    (lambda: OPS.unprepare_moe(packed().tensors(), layout="canonical", hidden=64, intermediate=160), ValueError,
     "mxfp4::unprepare_moe: w13 must be [E, S*I, H/2] = [7, 320, 32], got [7, 320, 48]."),
    (lambda: repack(7), ValueError,
     "mxfp4::repack_expert: expert must be in 0..6, got 7."),
    (lambda: repack(-1), ValueError,
     "mxfp4::repack_expert: expert must be in 0..6, got -1."),
    (lambda: repack(w13=byte(7, 320, 48)), ValueError,
     "mxfp4::repack_expert: w13 must be one expert's, [S*I, H/2], got [7, 320, 48]."),
    (lambda: repack(w13_bias=None), ValueError,
     "mxfp4::repack_expert: w13_bias must be bfloat16, as it is in packed, got absent."),
    (lambda: repack(w2_bias=torch.zeros(96)), ValueError,
     "mxfp4::repack_expert: w2_bias must be bfloat16, as it is in packed, got float32."),
    # prepare, select, MoEProblem
    (lambda: prepare(packed()), TypeError,
     "mxfp4_ops.prepare: experts must be canonical ExpertWeights, got PackedExperts in layout 'canonical'. Call unprepare() first."),
    (lambda: prepare(weights(TINY), prefer="nope"), ValueError,
     "mxfp4_ops.select: prefer must be one of native_cpu, reference, got 'nope'."),
    (lambda: prepare(weights(TINY), activation="swish"), ValueError,
     f"mxfp4_ops.prepare: activation must be one of {ACTIVATIONS}, got 'swish'."),
    (lambda: prepare(weights(TINY), problem_of(weights(TINY)), activation="gelu"), ValueError,
     "mxfp4_ops.prepare: activation must be left out where problem is given, which has 'silu', got 'gelu'."),
    (lambda: prepare(weights(TINY), problem_of(weights(TINY.with_(bias=False)))), ValueError,
     "mxfp4_ops.prepare: problem must have the weights' (experts, hidden, intermediate, bias) = (7, 96, 160, True), got "
     "(7, 96, 160, False)."),
    (lambda: unprepare(PackedExperts(*packed().tensors(), aux=(), layout="gone.v1", hidden=96, intermediate=160)), ValueError,
     "mxfp4_ops.unprepare: layout must be one of native_cpu.tile32.v1, canonical, got 'gone.v1'. Weights are packed by "
     "mxfp4_ops.prepare(); pass the layout it returned."),
    (lambda: repack_expert(packed(), 9, ExpertWeights(*(t[0] for t in weights(TINY).tensors().values()))), ValueError,
     "mxfp4::repack_expert: expert must be in 0..6, got 9."),
    (lambda: MoEProblem("cpu_avx2", 8, 48, 64), ValueError,
     "MoEProblem: hidden must be a positive multiple of 32, got 48."),
    (lambda: MoEProblem("cpu_avx2", 0, 32, 64), ValueError,
     "MoEProblem: experts must be positive, got 0."),
    (lambda: MoEProblem("cpu_avx2", 1, 32, 64, top_k=0), ValueError,
     "MoEProblem: top_k must be positive, got 0."),
    (lambda: MoEProblem("cpu_avx2", 1, 32, 64, x_dtype=torch.float64), TypeError,
     "MoEProblem: x_dtype must be float32, bfloat16 or float16, got float64."),
    (lambda: MoEProblem("cpu_avx2", 1, 32, 64, x_format="int9"), ValueError,
     "MoEProblem: x_format must be one of none, fp8x2, int15, int8, fp8, fp8_row, mxfp8, mxfp4, fp8_static, got 'int9'."),
    (lambda: MoEProblem("cpu_avx2", 1, 32, 64, activation=Activation("silu", beta=1.0)), ValueError,
     "MoEProblem: beta must be None for activation 'silu', which does not use it, got 1.0."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), CASES, ids=[c[2][:70] for c in CASES])
def test_sentence(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text


def test_a_layout_that_cannot_run_here_is_refused_with_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tag travels with the bytes; where its backend cannot run, the call says why before any work."""
    held = OPS.prepare_moe(*weights(TINY).tensors().values(), layout="native_cpu.tile32.v1")
    monkeypatch.setattr(native_cpu, "load_cpu", lambda: "the library is absent")
    plan_call.cache_clear()
    with pytest.raises(Unsupported) as caught:
        OPS.moe(*inputs(TINY), *held, [], layout="native_cpu.tile32.v1", hidden=96, intermediate=160)
    plan_call.cache_clear()
    assert str(caught.value) == (
        "mxfp4::moe: layout 'native_cpu.tile32.v1' cannot run here: needs the compiled kernels: the library is absent."
    )
