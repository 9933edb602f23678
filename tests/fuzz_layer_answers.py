"""What the ops of the layer have to return for a call of fuzz.py: float64 by problems.py and gradients.py, x in its
forms by x_format_reference.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gradients
import torch
from fuzz_calls import Call
from fuzz_layout_answers import held, logical_bias, plain, same
from mxfp4_ops import BACKENDS, Activation, ExpertWeights
from mxfp4_ops.layout import SLOTS
from problems import activate, answer, decode
from torch import Tensor
from x_format_reference import GROUPS, round_rows, round_static

_LARGE = 1e4  # beyond it float32 may overflow where float64 does not
_FLOAT32_ERROR = 3e-5  # of an activation's result, against the largest of its row
_FORMED_BOUND = 2e-4  # with many forms some elements are rounded to a neighbour; larger steps are counted one by one
_GRADIENT_BOUNDS = {torch.float32: 3e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Layer:
    """One call in canonical weights, local ids and numbers; x is float32 where it came quantized."""

    experts: ExpertWeights
    x: Tensor
    ids: Tensor
    routing: Tensor
    activation: Activation
    x_format: str
    quantized: bool
    input_scales: list[Tensor]
    dtype: torch.dtype
    on_input: bool
    bound: float  # relative error that a row may have

    @property
    def extreme(self) -> bool:
        """Where float32 ends the order of products matters; test_extreme_scale_bytes has these by hand."""
        pairs = (self.experts.w13_scale, self.experts.w2_scale)
        return any(((s > 200) & (s < 255)).any() for s in pairs)


def expanded(x: Tensor, scale: Tensor, x_format: str, size: int) -> Tensor:
    """float64 values of x that came quantized."""
    if x_format == "mxfp4":
        return decode(plain(x), plain(scale))
    factors = plain(scale)
    if factors.dtype is torch.uint8:
        factors = torch.where(
            factors == 255, torch.nan, torch.ldexp(torch.ones(factors.shape).double(), factors.int() - 127)
        )
    return plain(x).double() * factors.double().repeat_interleave(GROUPS[x_format] or size, -1)[:, :size]


def rows_of(ids: Tensor, numbers: Tensor) -> Tensor:
    place = {int(n): row for row, n in enumerate(numbers.tolist())}
    return torch.tensor([place.get(i, -1) for i in plain(ids).flatten().tolist()], dtype=ids.dtype).view(ids.shape)


def localise(call: Call, out: Any) -> None:
    same(out, rows_of(call.args["topk_ids"], call.args["expert_ids"]))


def _layer(a: dict[str, Any]) -> Layer:
    name, form, quantized = a["activation"], a.get("x_format", "none"), a.get("x_scale") is not None
    ids = plain(a["topk_ids"]) if a["expert_ids"] is None else rows_of(a["topk_ids"], a["expert_ids"])
    assert all(0 <= i < len(a["w13"]) or i == -1 for i in ids.flatten().tolist()), "an id was accepted"
    assert a["layout"] == "canonical" or form == "none", "these kernels know one form"
    six = held([a[n] for n in SLOTS], a["layout"], a["hidden"], a["intermediate"], not name.endswith("_no_mul"))
    tolerance = next(b.tolerance for b in BACKENDS if b.layout.tag == a["layout"])
    x = expanded(a["x"], a["x_scale"], form, a["hidden"]).float() if quantized else plain(a["x"])
    dtype = torch.bfloat16 if quantized else x.dtype
    bound = tolerance.of(dtype) * tolerance.worst_row  # what a row may have, and these calls have few
    return Layer(
        ExpertWeights(*(t if t.numel() else None for t in six)),
        x,
        ids,
        plain(a["topk_weights"]).float(),
        Activation(name, a.get("alpha"), a.get("beta"), a.get("limit")),
        form,
        quantized,
        [plain(t) for t in a["aux"]] if form == "fp8_static" else [],
        dtype,
        a.get("weight_on_input", False),
        bound if form == "none" else max(bound, _FORMED_BOUND),
    )


def _rounded(layer: Layer, rows: Tensor, expert: int, product: int) -> Tensor:
    if layer.input_scales:
        rounded = round_static(rows, float(layer.input_scales[product][expert]))
        return torch.where(rows.isnan(), torch.nan, rounded)
    return round_rows(rows.float(), layer.x_format)


def _formed_answer(layer: Layer) -> tuple[Tensor, Tensor]:
    """The layer with x in a form, float64, slot by slot; and what steps that float32 may have missed add to a row."""
    w, dense = layer.experts, {}
    out, slack = torch.zeros(layer.x.shape, dtype=torch.float64), torch.zeros(len(layer.x), dtype=torch.float64)
    for t, j in (layer.ids >= 0).nonzero().tolist():
        e, weight = int(layer.ids[t, j]), layer.routing[t, j]
        if e not in dense:
            dense[e] = decode(w.w13[e], w.w13_scale[e]), decode(w.w2[e], w.w2_scale[e])
        up, down = dense[e]
        x = layer.x[t : t + 1].float()
        if layer.quantized:  # rounded already
            h = x.double() @ up.T * (weight.double() if layer.on_input else 1)
        else:
            h = _rounded(layer, x * weight if layer.on_input else x, e, 0) @ up.T
        h = h if w.w13_bias is None else h + w.w13_bias[e].double()
        a = activate(layer.activation, h)
        step = a.sign() * a.abs().amax() * _FLOAT32_ERROR
        low, middle, high = (_rounded(layer, v.float(), e, 1) for v in (a - step, a, a + step))
        missed = (high - low).abs()
        missed = torch.where(missed > 4 * step.abs().amax(), missed, 0.0)
        y = middle @ down.T
        y = y if w.w2_bias is None else y + w.w2_bias[e].double()
        out[t] += y[0] if layer.on_input else weight.double() * y[0]
        slack[t] += (missed @ down.abs().T).norm() * (1 if layer.on_input else weight.abs().double())
    return out, slack


def _compare(layer: Layer, out: Tensor) -> None:
    x = layer.x
    assert out.shape == x.shape and out.dtype is layer.dtype
    scales = layer.input_scales
    if layer.extreme or not all((t.isfinite() & (t > 2.0**-20) & (t < 2.0**20)).all() for t in scales):
        return
    slack = torch.zeros(len(x), dtype=torch.float64)
    if layer.x_format == "none":
        wanted = answer(layer.experts, x, layer.ids, layer.routing, layer.activation, weight_on_input=layer.on_input)
    else:
        wanted, slack = _formed_answer(layer)
    wanted = torch.where(wanted.abs() > torch.finfo(out.dtype).max, torch.inf, wanted)
    factor = torch.ones(len(x))
    if layer.on_input:
        factor = torch.where(layer.ids < 0, 1, layer.routing).abs().amax(1).clamp_min(1)
    enters = x.double().abs().amax(1) * factor
    fine = torch.isfinite(wanted).all(1) & (wanted.abs().amax(1) < _LARGE) & (enters < _LARGE)
    bad = ~torch.isfinite(wanted) & torch.isfinite(factor)[:, None]  # Inf times x is not Inf times the product
    assert not torch.isfinite(out[bad]).any(), "a finite result for a NaN or an infinity"
    limits = torch.finfo(out.dtype)
    least = max(1e-30, 4 * limits.smallest_normal * limits.eps * x.shape[1] / layer.bound)
    tiny = fine & (wanted.norm(dim=1) < least)  # where the dtype of the result ends
    assert out[tiny].double().norm(dim=1).le(2 * least + slack[tiny]).all(), "a large result for a tiny one"
    fine &= ~tiny
    if fine.any():
        size = wanted[fine].norm(dim=1)
        error = (out[fine].double() - wanted[fine]).norm(dim=1)
        allowed = layer.bound * torch.maximum(size, size.square().mean().sqrt()) + slack[fine]
        assert (error <= allowed).all(), f"error {error.tolist()} of {size.tolist()}, allowed {allowed.tolist()}"


def moe(call: Call, out: Tensor) -> None:
    _compare(_layer(call.args), call.args.get("out", out))


def moe_unfinalized(call: Call, out: tuple[Tensor, Tensor]) -> None:
    """Every slot is a token of its own, with weight 1 unless it stands on the input."""
    layer, (rows, row_of_slot) = _layer(call.args), out
    assert rows.dtype is layer.dtype and row_of_slot.dtype is torch.int32 and row_of_slot.shape == layer.ids.shape
    assert rows.shape == (layer.ids.numel(), layer.x.shape[1])
    assert torch.equal(row_of_slot >= 0, layer.ids >= 0), "a slot without a row, or the other way round"
    t, j = (layer.ids >= 0).nonzero(as_tuple=True)
    places = row_of_slot[t, j].long()
    assert len(set(places.tolist())) == len(places), "two slots have one row"
    weights = layer.routing[t, j, None]
    alone = replace(  # one expert's row has no sum over experts that averages the rounding of its intermediate
        layer,
        bound=2 * layer.bound,
        x=layer.x[t],
        ids=layer.ids[t, j, None],
        routing=weights if layer.on_input else torch.ones_like(weights),
    )
    if len(places):
        _compare(alone, rows[places])


def finalize(call: Call, out: Tensor) -> None:
    rows, places, routing = (plain(call.args[n]) for n in ("rows", "row_of_slot", "topk_weights"))
    assert all(-1 <= p < len(rows) for p in places.flatten().tolist()), "a row that does not exist"
    total = torch.zeros(len(places), rows.shape[1])
    for t, slots in enumerate(places.tolist()):
        for j, place in enumerate(slots):
            if place >= 0:
                total[t] += rows[place].float() * routing[t, j].float()
    same(out, total.to(rows.dtype))


# --- gradients --------------------------------------------------------------------------------------------------------


def _gradients(layer: Layer, gradient: Tensor, limit: float | None) -> dict[str, Tensor]:
    activation = replace(layer.activation, limit=limit)
    inputs = (layer.experts, layer.x, layer.ids, layer.routing, gradient, activation, layer.on_input)
    with torch.enable_grad():
        return gradients.wanted(gradients.Layer(*inputs))


def moe_backward(call: Call, out: tuple[Tensor, ...]) -> None:
    a, layer = call.args, _layer(call.args)
    gradient, mask = plain(a["grad_output"]), a["output_mask"]
    inputs = [a[n] for n in gradients.NAMES]
    for found, wanted, like in zip(out, mask, inputs, strict=True):
        assert found.shape == (like.shape if wanted and like is not None else (0,)), "a mask is ignored"
        assert like is None or not wanted or found.dtype is like.dtype
    gated = not a["activation"].endswith("_no_mul")
    halves = {"w13_bias": (a["intermediate"], 2 if gated else 1), "w2_bias": (a["hidden"], 1)}
    ours = {n: t for n, t, asked in zip(gradients.NAMES, out, mask, strict=True) if asked and t.numel()}
    if a["layout"] != "canonical":
        ours |= {n: logical_bias(t, *halves[n]) for n, t in ours.items() if n in halves}
    # Autograd of the answer gives a NaN gate the slope 0, by its clamp; ours stays NaN.
    biases = [t.double() for t in (layer.experts.w13_bias, layer.experts.w2_bias) if t is not None]
    nan_scale = any((s == 255).any() for s in (layer.experts.w13_scale, layer.experts.w2_scale))
    numbers = (layer.x, layer.routing, gradient, *biases)
    if not (layer.ids >= 0).any():
        assert not any(t.any() for t in ours.values()), "a gradient out of nothing"
        return
    known = not (layer.extreme or nan_scale) and all((t.isfinite() & (t.abs() < _LARGE)).all() for t in numbers)
    if not ours or not known:
        return
    limit = layer.activation.limit
    if limit is None and a["activation"] == "swiglustep":
        limit = 7.0  # its default
    wanted = _gradients(layer, gradient, limit)
    around = [] if limit is None else [_gradients(layer, gradient, limit * s) for s in (1 - 1e-4, 1 + 1e-4)]
    for name, found in ours.items():
        theirs = wanted[name]
        size = theirs.norm()
        if not torch.isfinite(theirs).all() or theirs.abs().amax() > _LARGE or size < 1e-3:
            continue
        slack = (around[0][name] - around[1][name]).norm() if around else 0.0  # slopes end at the limit
        error = (found.double() - theirs).norm()
        bound = max(_GRADIENT_BOUNDS[layer.dtype], 2.0**-8 if found.dtype is torch.bfloat16 else 0.0)
        assert error <= bound * size + slack, f"gradient of {name}: {error:.2e} of {size:.2e}"
