"""Every sentence about forms of x, buffers for results, and the two halves of moe, whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mxfp4_ops import MXFP4Experts, prepare, quant_x
from problems import TINY, inputs, moe_call, weights
from test_errors import MOE, OPS, byte, moe
from torch import Tensor

E4M3 = torch.float8_e4m3fn
FORMS = "none, fp8x2, int15, int8, fp8, fp8_row, mxfp8, mxfp4, fp8_static"


def x8(tokens: int = 5, hidden: int = 96, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.zeros(tokens, hidden).to(dtype)


def moe_out(out: Tensor) -> None:
    args, kwargs = moe_call(prepare(weights(TINY), prefer="reference"), *inputs(TINY))
    OPS.moe.out(*args, **kwargs, out=out)


def finalize(**changes: Any) -> Tensor:
    args = {
        "rows": torch.zeros(4, 32),
        "row_of_slot": torch.zeros(2, 2, dtype=torch.int32),
        "topk_weights": torch.zeros(2, 2),
    }
    return OPS.finalize(**{**args, **changes})


def static(*aux: Tensor) -> Tensor:
    return moe(x_format="fp8_static", aux=list(aux))


OUT, FINALIZE = "mxfp4::moe.out: ", "mxfp4::finalize: "
CASES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: moe(x_format="fp4"), ValueError,
     MOE + f"x_format must be one of {FORMS}, got 'fp4'."),
    (lambda: MXFP4Experts(prepare(weights(TINY)), x_format="fp4"), ValueError,
     f"MXFP4Experts: x_format must be one of {FORMS}, got 'fp4'."),
    (lambda: moe(x_scale=torch.ones(5)), ValueError,
     MOE + "x_scale must be None for x_format 'none', which takes x in its own dtype."),
    (lambda: moe(x_scale=torch.ones(5), x_format="fp8x2"), ValueError,
     MOE + "x_scale must be None for x_format 'fp8x2', which takes x in its own dtype."),
    (lambda: moe(x_scale=torch.ones(5), x_format="fp4"), ValueError,
     MOE + f"x_format must be one of {FORMS}, got 'fp4'."),
    (lambda: moe(x=x8(), x_format="fp8"), TypeError,
     MOE + "x must be float32 or bfloat16 or float16, got float8_e4m3fn."),
    (lambda: moe(x_scale=torch.ones(5, 1), x_format="fp8"), TypeError,
     MOE + "x must be float8_e4m3fn, got bfloat16."),
    (lambda: moe(x=x8(dtype=torch.int8), x_scale=byte(5, 3), x_format="int8"), TypeError,
     MOE + "x_scale must be float32, got uint8."),
    (lambda: moe(x=x8(), x_scale=torch.ones(5, 3), x_format="mxfp8"), TypeError,
     MOE + "x_scale must be uint8 or float8_e8m0fnu, got float32."),
    (lambda: moe(x=x8(), x_scale=torch.ones(5, 2), x_format="fp8"), ValueError,
     MOE + "x_scale must be [T, 1] with T = 5 for x_format 'fp8' and H = 96, got [5, 2]."),
    (lambda: moe(x=x8(), x_scale=byte(4, 3), x_format="mxfp8"), ValueError,
     MOE + "x_scale must be [T, 3] with T = 5 for x_format 'mxfp8' and H = 96, got [4, 3]."),
    (lambda: moe(x=x8(), x_scale=torch.ones(5, 1, device="meta"), x_format="fp8"), ValueError,
     MOE + "x_scale must be on x's device cpu, got meta."),
    (lambda: moe(x=byte(5, 96), x_scale=byte(5, 3), x_format="mxfp4"), ValueError,
     MOE + "x must be [T, H/2] with H = hidden = 96, got [5, 96]."),
    (lambda: static(), ValueError,
     MOE + "aux must hold 2 tensors (w13_input_scale, w2_input_scale), got 0."),
    (lambda: static(torch.ones(7), torch.ones(6)), ValueError,
     MOE + "w2_input_scale must be [E] = [7], got [6]."),
    (lambda: static(torch.ones(7).half(), torch.ones(7)), TypeError,
     MOE + "w13_input_scale must be float32, got float16."),
    (lambda: static(torch.ones(7, device="meta"), torch.ones(7)), ValueError,
     MOE + "w13_input_scale must be on w13's device cpu, got meta."),
    (lambda: moe(w13=None, x_format="fp8_static", aux=[torch.ones(7), torch.ones(7)]), TypeError,
     MOE + "w13 must be a tensor, got None."),
    (lambda: moe(aux=[torch.ones(7), torch.ones(7)]), ValueError,
     MOE + "aux must hold 0 tensors (none here), got 2."),
    (lambda: quant_x(torch.zeros(2, 32), "int15"), ValueError,
     "mxfp4_ops.quant_x: x_format must be one of int8, fp8, fp8_row, mxfp8, mxfp4, got 'int15'."),
    (lambda: quant_x(torch.zeros(2, 48), "int8"), ValueError,
     "mxfp4_ops.quant_x: H, the last dimension of x, must be a positive multiple of 32, got 48."),
    (lambda: quant_x(torch.zeros(32), "int8"), ValueError,
     "mxfp4_ops.quant_x: x must be [T, H], got [32]."),
    (lambda: quant_x(torch.zeros(2, 32, dtype=torch.int32), "int8"), TypeError,
     "mxfp4_ops.quant_x: x must be float32 or bfloat16 or float16, got int32."),
    (lambda: moe_out(torch.zeros(5, 96)), TypeError,
     OUT + "out must be bfloat16, got float32."),
    (lambda: moe_out(torch.zeros(4, 96, dtype=torch.bfloat16)), ValueError,
     OUT + "out must be the result's shape = [5, 96], got [4, 96]."),
    (lambda: moe_out(torch.zeros(5, 96, dtype=torch.bfloat16, device="meta")), ValueError,
     OUT + "out must be on the input's device cpu, got meta."),
    (lambda: moe_out(torch.zeros(1, 96, dtype=torch.bfloat16).expand(5, 96)), ValueError,
     OUT + "out must have memory of its own for each element, got strides [0, 1]."),
    (lambda: moe_out(torch.zeros(5, 96, dtype=torch.bfloat16).requires_grad_()), ValueError,
     OUT + "out must not be given where a gradient is needed. Leave it out, or call under torch.no_grad()."),
    (lambda: OPS.dequant.out(byte(4, 32), byte(4, 2), out=torch.zeros(64, 4).t()), ValueError,
     "mxfp4::dequant.out: out must be contiguous, got strides [1, 4]. It is written in place."),
    (lambda: OPS.dequant.out(byte(4, 32), byte(4, 2), dtype=torch.float32, out=torch.zeros(4, 64).half()), TypeError,
     "mxfp4::dequant.out: out must be float32, got float16."),
    (lambda: OPS.dequant.out(byte(4, 32), byte(4, 2), out=torch.zeros(4, 64).double()), TypeError,
     "mxfp4::dequant.out: dtype must be float32, bfloat16 or float16, got float64."),
    (lambda: OPS.dequant.out(byte(4, 32), byte(4, 2), out=torch.zeros(4, 32)), ValueError,
     "mxfp4::dequant.out: out must be the result's shape = [4, 64], got [4, 32]."),
    (lambda: finalize(rows=torch.zeros(4, 32).double()), TypeError,
     FINALIZE + "rows must be float32 or bfloat16 or float16, got float64."),
    (lambda: finalize(rows=torch.zeros(32)), ValueError,
     FINALIZE + "rows must be [R, H], got [32]."),
    (lambda: finalize(row_of_slot=torch.zeros(2, 2)), TypeError,
     FINALIZE + "row_of_slot must be int32, got float32."),
    (lambda: finalize(row_of_slot=torch.zeros(2, dtype=torch.int32)), ValueError,
     FINALIZE + "row_of_slot must be [T, K], got [2]."),
    (lambda: finalize(topk_weights=torch.zeros(2, 3)), ValueError,
     FINALIZE + "topk_weights must be the shape of row_of_slot = [2, 2], got [2, 3]."),
    (lambda: finalize(topk_weights=torch.zeros(2, 2, dtype=torch.int32)), TypeError,
     FINALIZE + "topk_weights must be a float dtype, got int32."),
    (lambda: finalize(topk_weights=torch.zeros(2, 2, device="meta")), ValueError,
     FINALIZE + "topk_weights must be on rows' device cpu, got meta."),
    (lambda: finalize(row_of_slot=torch.tensor([[0, 4], [0, 0]], dtype=torch.int32)), ValueError,
     FINALIZE + "row_of_slot must be -1 (skip) or a row below R = 4, got 4."),
    (lambda: finalize(row_of_slot=torch.tensor([[0, -2], [0, 0]], dtype=torch.int32)), ValueError,
     FINALIZE + "row_of_slot must be -1 (skip) or a row below R = 4, got -2."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "sentence"), CASES, ids=[c[2] for c in CASES])
def test_sentence(call: Callable[[], Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == sentence
