"""How x enters the products: every x_format against a second definition, by hand, in the layer, and refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from mxfp4_ops import X_FORMATS, Activation, ExpertWeights, MXFP4Experts, PackedExperts, prepare, quant_mxfp4, quant_x
from mxfp4_ops.backends import Backend, reference
from mxfp4_ops.x_formats import FORMS, INPUT_SCALES, quantize, round_static, round_x
from problems import GPT_OSS, TINY, activate, answer, decode, errors, inputs, moe_call, weights
from test_ops import VIEW_CHECKS, opcheck
from torch import Tensor
from x_format_reference import e4m3_values, round_rows
from x_format_reference import round_static as round_static_again

OPS = torch.ops.mxfp4
QUANTIZABLE = [name for name, form in FORMS.items() if form.x_dtypes]


def difficult_rows() -> Tensor:
    """float32 rows of 160: five groups of 32, one of 128 and a short one; all sizes, ties, zeros, a lone outlier."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(40, 160, generator=g)
    sizes = torch.tensor([2.0**e for e in (-149, -140, -127, -120, -60, 0, 3, 60, 118, 120)]).repeat_interleave(4)
    ties = torch.tensor(e4m3_values())
    ties = torch.cat([ties, (ties[1:] + ties[:-1]) / 2, -ties[1:40]])[: 160 * (289 // 160)].reshape(-1, 160)
    steps = torch.arange(160.0).sub(80).div(2).repeat(2, 1)  # halves: ties of the integer forms
    steps[0, ::32], steps[1, ::32] = 127.0, 32512.0
    powers = 2.0 ** torch.arange(-80.0, 80.0)
    outlier = torch.full((1, 160), 1e-3)
    outlier[0, 77] = 3e4
    special = torch.zeros(2, 160)
    special[1] = -0.0
    largest = torch.full((1, 160), torch.finfo(torch.float32).max)
    return torch.cat([normal * sizes[:, None], ties, steps, powers[None], outlier, special, largest])


@pytest.mark.parametrize("x_format", FORMS)
def test_against_a_second_definition(x_format: str, device: str) -> None:
    x = difficult_rows()
    found = round_x(x.to(device), x_format).cpu().double()
    wanted = round_rows(x, x_format).float().double()  # the definition ends in float32
    assert torch.equal(found, wanted)


def test_static_against_a_second_definition(device: str) -> None:
    x = difficult_rows()
    for scale in (1.0, 0.37, 2.0**-20, 3e30):
        found = round_static(x.to(device), torch.tensor(scale, device=device)).cpu().double()
        assert torch.equal(found, round_static_again(x, float(torch.tensor(scale))).float().double()), scale


BY_HAND = {  # a row of 32 or more: the first element sets the scale, 1 here but where said
    "int8": ([127, 0.5, 1.5, 2.5, -2.5], [127, 0, 2, 2, -2]),  # s = 127/127; halves to even
    "int15": ([32512, 200.5, 201.5, -0.75], [32512, 200, 202, -1]),
    "fp8_row": ([448, 17, 19, 0.0009765625], [448, 16, 20, 0]),  # step 2 above 16; 2^-10 is half the least value
    "fp8": ([449, 17, 19, 34], [448, 16, 20, 32]),  # 449 > 448: s = 2, 449/2 -> 224, 8.5 -> 8, 9.5 -> 10, 17 -> 16
    "mxfp8": ([448, 17, 19, -17], [448, 16, 20, -16]),
    "fp8x2": ([448, 17, 17.03125, -0.3], [448, 17, 17, -0.2998046875]),
    # 17.03125: hi 18, lo = e4m3(-15.5) = -16 by the tie; -0.3: hi -0.3125, lo = e4m3(0.2) = 0.203125
    "mxfp4": ([6, 2.5, 5, -0.25], [6, 2, 4, 0]),
}


@pytest.mark.parametrize("x_format", BY_HAND)
def test_by_hand(x_format: str) -> None:
    given, wanted = BY_HAND[x_format]
    x = torch.zeros(1, 128)
    x[0, : len(given)] = torch.tensor(given)
    assert round_x(x, x_format)[0, : len(wanted)].tolist() == wanted


def test_planes_by_hand() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([32512.0, 200.0, -200.0, 128.0])
    planes, scale = quantize(x, FORMS["int15"])
    assert scale.tolist() == [[1.0]]
    assert planes[0, 0, :, :4].tolist() == [[127, 1, -1, 1], [0, -56, 56, -128]]  # 256 hi + lo
    planes, scale = quantize(x / 32512 * 448, FORMS["fp8x2"])
    assert planes.shape == (1, 1, 2, 32) and scale.tolist() == [[1.0]]


@pytest.mark.parametrize("x_format", QUANTIZABLE)
def test_quant_x_shapes_dtypes_and_values(x_format: str, device: str) -> None:
    x = difficult_rows().to(device)
    data, scale = quant_x(x, x_format)
    form = FORMS[x_format]
    assert data.dtype is form.x_dtypes[0] and scale.dtype is form.scale_dtypes[0]
    assert data.shape == (len(x), 80 if x_format == "mxfp4" else 160) and data.is_contiguous()
    assert scale.shape == (len(x), {"int8": 5, "mxfp8": 5, "mxfp4": 5, "fp8": 2, "fp8_row": 1}[x_format])
    if x_format == "mxfp4":
        assert all(torch.equal(a, b) for a, b in zip((data, scale), quant_mxfp4(x), strict=True))
    assert quant_x(x[:0], x_format)[0].shape[0] == 0


@pytest.mark.parametrize("x_format", FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_group_is_nan_and_no_other(x_format: str, bad: float) -> None:
    x = torch.ones(3, 160)
    x[1, 40] = bad
    found = round_x(x, x_format)
    assert torch.isnan(found[1, 32:64]).all() and torch.isfinite(found[[0, 2]]).all()
    if FORMS[x_format].group == 32:
        assert torch.isfinite(found[1, :32]).all() and torch.isfinite(found[1, 64:]).all()


def rounded_answer(
    experts: ExpertWeights,
    x: Tensor,
    ids: Tensor,
    routing: Tensor,
    rounded: Callable[[Tensor, int, int], Tensor],
    *,
    weight_on_input: bool = False,
) -> Tensor:
    """The layer slot by slot in float64, with what enters the products rounded: ``rounded(rows, expert, product)``."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for e, w in zip(ids[t].tolist(), routing[t].float().cpu(), strict=True):
            if e < 0:
                continue
            row = x[t : t + 1].cpu().float()
            h = rounded(row * w if weight_on_input else row, e, 0) @ decode(experts.w13[e], experts.w13_scale[e]).T
            h = h if experts.w13_bias is None else h + experts.w13_bias[e].cpu().double()
            a = activate(Activation(), h).float()
            y = rounded(a, e, 1) @ decode(experts.w2[e], experts.w2_scale[e]).T
            y = y if experts.w2_bias is None else y + experts.w2_bias[e].cpu().double()
            out[t] += y[0] if weight_on_input else w.double() * y[0]
    return out


def on_reference(device: str) -> tuple[ExpertWeights, PackedExperts]:
    experts = weights(TINY, device=device)
    return experts, prepare(experts, prefer="reference")


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("x_format", FORMS)
def test_both_products_take_the_form(x_format: str, weight_on_input: bool, device: str) -> None:
    experts, packed = on_reference(device)
    args = inputs(TINY, torch.float32, device=device)
    out = packed(*args, x_format=x_format, weight_on_input=weight_on_input)
    wanted = rounded_answer(
        experts, *args, lambda rows, *_: round_rows(rows, x_format), weight_on_input=weight_on_input
    )
    assert errors(out, wanted)[0] < 1e-5


def with_scales(packed: PackedExperts) -> PackedExperts:
    scales = torch.linspace(0.003, 0.02, TINY.experts, device=packed.w13.device)
    return dataclasses.replace(packed, w13_input_scale=scales, w2_input_scale=scales.flip(0) * 2)


@pytest.mark.parametrize("weight_on_input", [False, True])
def test_static_scales_are_the_expert_s_own(device: str, weight_on_input: bool) -> None:
    experts, packed = on_reference(device)
    packed, args = with_scales(packed), inputs(TINY, torch.float32, device=device)
    names = [getattr(packed, name) for name in INPUT_SCALES]

    def rounded(rows: Tensor, expert: int, product: int) -> Tensor:
        return round_static_again(rows, float(names[product][expert]))

    wanted = rounded_answer(experts, *args, rounded, weight_on_input=weight_on_input)
    out = packed(*args, x_format="fp8_static", weight_on_input=weight_on_input)
    assert errors(out, wanted)[0] < 1e-5
    assert torch.equal(packed(*args), on_reference(device)[1](*args)), "they change no other form"


@pytest.mark.parametrize("x_format", [f for f in X_FORMATS if f != "fp8_static"])
def test_error_against_unrounded_x(x_format: str) -> None:
    problem = GPT_OSS.with_(tokens=2)
    experts, args = weights(problem), inputs(problem)
    out = prepare(experts, activation="swigluoai", prefer="reference")(*args, x_format=x_format)
    bound = reference.BACKEND.tolerance.of(torch.bfloat16, x_format)
    whole = errors(out, answer(experts, *args, Activation("swigluoai")))[0]
    assert bound / 4 < whole < bound, (whole, bound)


@pytest.mark.parametrize("x_format", QUANTIZABLE)
def test_x_that_comes_quantized(x_format: str, device: str) -> None:
    _, packed = on_reference(device)
    x, ids, routing = inputs(TINY, device=device)
    data, scale = quant_x(x, x_format)
    out = packed(data, ids, routing, x_scale=scale, x_format=x_format)
    assert out.dtype is torch.bfloat16 and out.shape == x.shape
    assert torch.equal(out, packed(x, ids, routing, x_format=x_format))
    other = scale + 1 if scale.dtype is torch.uint8 else scale * 2
    assert not torch.equal(out, packed(data, ids, routing, x_scale=other, x_format=x_format))
    for dtype in FORMS[x_format].x_dtypes[1:]:
        assert torch.equal(out, packed(data.view(dtype), ids, routing, x_scale=scale, x_format=x_format))
    for dtype in FORMS[x_format].scale_dtypes[1:]:
        assert torch.equal(out, packed(data, ids, routing, x_scale=scale.view(dtype), x_format=x_format))
    on_input = packed(data, ids, routing, x_scale=scale, x_format=x_format, weight_on_input=True)
    experts = weights(TINY, device=device)
    again = round_rows(x.float(), x_format).float().to(device)  # weighed after the product, since it is rounded already
    wanted = rounded_answer(
        experts,
        again,
        ids,
        routing,
        lambda rows, _, product: round_rows(rows, x_format) if product else rows.double(),
        weight_on_input=True,
    )
    assert errors(on_input, wanted)[0] < 3e-3


@pytest.mark.parametrize("x_format", FORMS)
def test_n5_feeding_rounded_x_changes_nothing(x_format: str) -> None:
    """Rule N5: the quantizer inside moe is the same function. int forms keep a scale that a rounded maximum moves."""
    _, packed = on_reference("cpu")
    x, ids, routing = inputs(TINY, torch.float32)
    again = round_x(x, x_format)
    if x_format in ("mxfp4", "mxfp8", "fp8"):
        assert torch.equal(round_x(again, x_format), again)
        assert torch.equal(packed(again, ids, routing, x_format=x_format), packed(x, ids, routing, x_format=x_format))
    else:
        torch.testing.assert_close(round_x(again, x_format), again, rtol=1e-6, atol=0)


@pytest.mark.parametrize("x_format", X_FORMATS)
def test_graphs_modules_and_unfinalized(x_format: str, device: str) -> None:
    packed = with_scales(on_reference(device)[1])
    x, ids, routing = inputs(TINY, device=device)
    args, kwargs = moe_call(packed, x, ids, routing, x_format=x_format)
    scales = [packed.w13_input_scale, packed.w2_input_scale] if x_format == "fp8_static" else []
    args = (*args[:9], scales, *args[10:])
    opcheck(OPS.moe, args, kwargs)
    out = packed(x, ids, routing, x_format=x_format)
    assert torch.equal(out, OPS.moe(*args, **kwargs))
    module = MXFP4Experts(packed, x_format=x_format)
    assert torch.equal(module(x, ids, routing), out)
    torch.compiler.reset()  # one graph for each form would pass the limit on recompiles
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, routing), out)
    again = MXFP4Experts(packed, x_format=x_format)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x, ids, routing), out)
    rows, row_of_slot = packed.unfinalized(x, ids, routing, x_format=x_format)
    assert errors(OPS.finalize(rows, row_of_slot, routing), out.cpu().double())[0] < 6e-3


@pytest.mark.parametrize("x_format", QUANTIZABLE)
def test_c1_opcheck_with_quantized_x(x_format: str, device: str) -> None:
    _, packed = on_reference(device)
    x, ids, routing = inputs(TINY, device=device)
    data, scale = quant_x(x, x_format)
    args, kwargs = moe_call(packed, data, ids, routing, x_format=x_format)
    for op in (OPS.moe, OPS.moe_unfinalized):
        opcheck(op, (*args, None, scale), kwargs, VIEW_CHECKS)
    rows, row_of_slot = packed.unfinalized(data, ids, routing, x_scale=scale, x_format=x_format)
    out = packed(data, ids, routing, x_scale=scale, x_format=x_format)
    assert rows.dtype is torch.bfloat16
    assert errors(OPS.finalize(rows, row_of_slot, routing), out.cpu().double())[0] < 6e-3


@pytest.mark.parametrize("x_format", FORMS)
def test_rows_stay_alone(x_format: str, runnable: tuple[str, Backend]) -> None:
    """A row's form does not depend on other rows: batch_invariant gives the same bits for every T."""
    device, _ = runnable
    _, packed = on_reference(device)
    x, ids, routing = inputs(TINY, device=device)
    whole = packed(x, ids, routing, x_format=x_format, batch_invariant=True)
    one = packed(x[2:3], ids[2:3], routing[2:3], x_format=x_format, batch_invariant=True)
    assert torch.equal(one, whole[2:3])
