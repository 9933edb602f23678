"""Gradients of qdq and route, what has none and says so, the ops themselves, and layouts that move what they hold."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradients import Layer, found, relative, wanted
from mxfp4_ops import Activation, Layout, PackedExperts, dispatch, prepare, routing
from mxfp4_ops.backends import Backend, reference
from mxfp4_ops.experts import join_gate_up, split_gate_up
from mxfp4_ops.layout import TensorSpec, canonical_specs
from mxfp4_ops.route_gradient import weights_at
from mxfp4_ops.x_formats import FORMS
from problems import TINY, inputs, moe_call, weights
from test_autograd import backward_call, make, pack
from test_ops import opcheck, strided
from torch import Tensor

OPS = torch.ops.mxfp4
Runnable = tuple[str, Backend]
METHODS = [(m, r) for m, known in routing.METHODS.items() for r in (True, False) if known.renormalize in (None, r)]
SCORES = {
    "softmax_topk": lambda x: x.softmax(-1),
    "topk_softmax": lambda x: x.softmax(-1),
    "sigmoid_topk": torch.sigmoid,
    "topk_sigmoid": torch.sigmoid,
    "sqrtsoftplus_topk": lambda x: x.exp().log1p().sqrt(),
}

# --- qdq and route ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_b1_qdq_passes_the_gradient_straight_through(device: str, dtype: torch.dtype) -> None:
    """Saturated elements, and those of a block with Inf or NaN, are no exception."""
    x = torch.randn(3, 64, device=device).to(dtype)
    x[0, :2], x[1, 3], x[2, 40] = torch.tensor([7.0, -7.0]).to(x), torch.inf, torch.nan
    gradient = torch.randn(3, 64, device=device).to(dtype)
    for op in (OPS.qdq, OPS.qdq_mxfp4):
        leaf = x.clone().requires_grad_()
        op(leaf).backward(gradient)
        assert leaf.grad is not None and leaf.grad.dtype is dtype and torch.equal(leaf.grad, gradient)
    compiled = torch.compile(OPS.qdq, fullgraph=True, backend="aot_eager")
    compiled(leaf).backward(gradient)
    assert torch.equal(leaf.grad, 2 * gradient)


def test_route_by_hand(device: str) -> None:
    """Weights 1/2 and 1/2 of equal logits: the slope is w (1 - w) = 1/4, times the scale."""
    logits = torch.tensor([[1.0, -3.0, 1.0]], device=device, requires_grad=True)
    OPS.route(logits, None, None, None, 2, scale=2.0)[1][0, 0].backward()
    assert logits.grad is not None and logits.grad.tolist() == [[0.5, 0.0, -0.5]]


@pytest.mark.parametrize(("method", "renormalize"), METHODS)
def test_b1_route_gradient(device: str, method: str, renormalize: bool) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 9, generator=g).to(device)
    gradient = torch.randn(5, 3, generator=g).to(device)
    options = {"method": method, "renormalize": renormalize, "scale": 2.5}
    leaf = logits.clone().requires_grad_()
    ids, routed = OPS.route(leaf, None, None, None, 3, **options)
    routed.backward(gradient)
    leaf64 = logits.double().requires_grad_()
    scores = SCORES[method](leaf64).gather(1, ids.long())
    theirs = scores / scores.sum(-1, keepdim=True) if renormalize else scores
    (want,) = torch.autograd.grad(2.5 * theirs, leaf64, gradient.double())
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights_at(logits, ids, **options), routed, rtol=1e-6, atol=1e-7)
    assert torch.autograd.gradcheck(lambda x: weights_at(x, ids, **options), leaf64)
    half = logits.bfloat16().requires_grad_()
    OPS.route(half, None, None, None, 3, **options)[1].sum().backward()
    assert half.grad is not None and half.grad.dtype is torch.bfloat16
    torch.compiler.reset()  # one graph for each method and device would pass the limit on recompiles
    route = torch.compile(
        lambda x: OPS.route(x, None, None, None, 3, **options)[1], fullgraph=True, backend="aot_eager"
    )
    (again,) = torch.autograd.grad(route(leaf), leaf, gradient)
    assert torch.equal(again, leaf.grad)
    opcheck(OPS.route, (leaf, None, None, None, 3), options, ("test_schema", "test_faketensor"))


def test_route_under_checkpointing_and_twice(device: str) -> None:
    logits = torch.randn(4, 6, device=device, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return OPS.route(x * 2, None, None, None, 2)[1].square().sum()

    (plain,) = torch.autograd.grad(loss(logits), logits, create_graph=True)
    saved = torch.utils.checkpoint.checkpoint(loss, logits, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(saved, logits)[0], plain)
    with torch.autograd.graph.save_on_cpu():
        off = loss(logits)
    assert torch.equal(torch.autograd.grad(off, logits)[0], plain)
    (second,) = torch.autograd.grad(plain.square().sum(), logits)
    chosen = (logits * 2).topk(2).values.softmax(-1)  # the same by torch alone
    (theirs,) = torch.autograd.grad(chosen.square().sum(), logits, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(theirs.square().sum(), logits)[0])


def test_a_bias_that_only_chooses_has_the_gradient_zero(device: str) -> None:
    """And groups and a table of experts leave the weights' formula as it is."""
    logits = torch.randn(3, 8, device=device, requires_grad=True)
    bias = torch.randn(8, device=device, requires_grad=True)
    ids, routed = OPS.route(logits, bias, None, None, 2, method="sigmoid_topk", groups=4, topk_groups=2)
    routed.square().sum().backward()
    assert bias.grad is not None and torch.equal(bias.grad, torch.zeros_like(bias))
    scores = logits.detach().double().sigmoid().requires_grad_()
    chosen = scores.gather(1, ids.long())
    (by_score,) = torch.autograd.grad((chosen / chosen.sum(1, keepdim=True)).square().sum(), scores)
    want = by_score * scores * (1 - scores)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), want.detach(), rtol=1e-5, atol=1e-6)


def test_a_table_of_experts_gives_no_gradient_to_a_slot_of_minus_one(device: str) -> None:
    logits = torch.tensor([[0.0, 1.0, -200.0]], device=device, requires_grad=True)
    ids = torch.tensor([[1, -1, 2]], device=device)
    weights_at(logits, ids, "sqrtsoftplus_topk", False, 1.0).sum().backward()
    assert logits.grad is not None and logits.grad[0, 0] == 0
    slope = torch.sigmoid(torch.tensor(1.0)) / (2 * torch.nn.functional.softplus(torch.tensor(1.0)).sqrt())
    assert logits.grad[0, 1].item() == pytest.approx(slope.item(), rel=1e-6)
    assert logits.grad[0, 2].item() == pytest.approx(math.exp(-100) / 2, rel=1e-5), "finite where softplus underflows"


# --- what has no gradient ---------------------------------------------------------------------------------------------


def test_b1_unfinalized_and_finalize_name_themselves(device: str) -> None:
    packed, (x, ids, routing) = prepare(weights(TINY, device=device)), inputs(TINY, torch.float32, device=device)
    with pytest.raises(NotImplementedError, match="mxfp4::moe_unfinalized: backward is not implemented"):
        packed.unfinalized(x.requires_grad_(), ids, routing)[0].sum().backward()
    rows, row_of_slot = packed.unfinalized(x.detach(), ids, routing)
    with pytest.raises(NotImplementedError, match="mxfp4::finalize: backward is not implemented"):
        OPS.finalize(rows.requires_grad_(), row_of_slot, routing).sum().backward()


@pytest.mark.parametrize("x_format", FORMS)
def test_forms_of_x_have_no_gradient_and_say_so(device: str, x_format: str) -> None:
    packed = prepare(weights(TINY, device=device), prefer="reference")
    x, ids, routing = inputs(TINY, torch.float32, device=device)
    with pytest.raises(NotImplementedError, match=f"exists for x_format 'none' alone, got '{x_format}'"):
        packed(x.requires_grad_(), ids, routing, x_format=x_format).sum().backward()


def test_b1_prepare_and_unprepare_name_themselves(device: str) -> None:
    six = list(weights(TINY, device=device).tensors().values())
    six[2] = six[2].float().requires_grad_()
    packed = OPS.prepare_moe(*six, layout="canonical")
    with pytest.raises(NotImplementedError, match="mxfp4::prepare_moe: backward is not implemented"):
        packed[2].sum().backward()
    held = [t.detach().clone() for t in packed]
    held[2].requires_grad_()
    back = OPS.unprepare_moe(held, layout="canonical", hidden=96, intermediate=160)
    with pytest.raises(NotImplementedError, match="mxfp4::unprepare_moe: backward is not implemented"):
        back[2].sum().backward()


def test_quant_gives_bytes_that_need_no_gradient(device: str) -> None:
    x = torch.randn(2, 64, device=device, requires_grad=True)
    assert not any(t.requires_grad for t in OPS.quant(x))


def test_repacking_under_a_gradient_is_refused() -> None:
    packed = prepare(weights(TINY), prefer="reference").tensors()
    packed[2].requires_grad_()
    one: list[Tensor | None] = [None if t is None else t[0] for t in weights(TINY).tensors().values()]
    with pytest.raises(ValueError, match="w13_bias in packed must not require a gradient"):
        OPS.repack_expert(packed, 0, *one, layout="canonical")


def test_b1_a_second_derivative_names_the_op(runnable: Runnable) -> None:
    layer = make(TINY, device=runnable[0])
    x = layer.x.requires_grad_()
    out = pack(runnable, layer)(x, layer.ids, layer.routing)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="mxfp4::moe_backward: backward is not implemented"):
        gradient.sum().backward()


def test_b1_frozen_weights_of_a_float_dtype_are_refused(device: str) -> None:
    """Scales may come as float8_e8m0fnu, which torch lets require a gradient: never a quiet None."""
    packed = prepare(weights(TINY, device=device), prefer="reference")
    scales = packed.w2_scale.view(torch.float8_e8m0fnu).requires_grad_()
    out = replace(packed, w2_scale=scales)(*inputs(TINY, torch.float32, device=device))
    with pytest.raises(ValueError, match="mxfp4::moe: w2_scale must not require a gradient, since packed experts"):
        out.sum().backward()


def test_b1_other_forms_of_x_are_refused_by_name(runnable: Runnable) -> None:
    layer = make(TINY, device=runnable[0])
    args, options = backward_call(layer, pack(runnable, layer))
    with pytest.raises(
        NotImplementedError, match=r"gradient of mxfp4::moe exists for x_format 'none' alone, got 'any'"
    ):
        OPS.moe_backward(*args, **{**options, "x_format": "any"})


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"grad_output": torch.zeros(5, 64)}, ValueError,
         r"grad_output must be \[T, H\] as x = \[5, 96\], got \[5, 64\]."),
        ({"grad_output": torch.zeros(5, 96).half()}, TypeError, "grad_output must be float32, got float16."),
        ({"grad_output": torch.zeros(5, 96, device="meta")}, ValueError,
         "grad_output must be on x's device cpu, got meta."),
        ({"w2_bias": None}, ValueError, "output_mask must be False for w2_bias, which is None."),
        ({"topk_ids": torch.full((5, 4), 7)}, ValueError, "topk_ids must be below the number of experts E = 7, got 7."),
        ({"x": torch.zeros(5, 64)}, ValueError, r"x must be \[T, H\] with H = hidden = 96, got \[5, 64\]."),
        ({"x_scale": torch.ones(5)}, ValueError,
         "x_scale must be None for x_format 'none', which takes x in its own dtype."),
    ],
)  # fmt: skip
def test_sentences(change: dict[str, Any], error: type[Exception], text: str) -> None:
    layer = make(TINY)
    args, options = backward_call(layer, prepare(layer.experts, prefer="reference"))
    names = [a.name for a in OPS.moe_backward.default._schema.arguments if not a.kwarg_only]
    with pytest.raises(error, match=f"^mxfp4::moe_backward: {text}$"):
        OPS.moe_backward(*(change.get(n, a) for n, a in zip(names, args, strict=True)), **options)


# --- the ops ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_c1_opcheck_moe_backward(runnable: Runnable, tokens: int, bias: bool) -> None:
    layer = make(TINY.with_(tokens=tokens, bias=bias, hidden=64, intermediate=32), torch.bfloat16, runnable[0])
    packed = pack(runnable, layer)
    args, options = backward_call(layer, packed)
    options |= {"output_mask": [True, True, bias, False]}
    opcheck(OPS.moe_backward, tuple(args), options)
    opcheck(OPS.moe_backward, (*map(strided, args[:4]), *args[4:]), options)
    leaves = [layer.x.float().requires_grad_(), layer.routing.clone().requires_grad_()]
    biased = replace(packed, w13_bias=packed.w13_bias.clone().requires_grad_()) if bias else packed
    opcheck(OPS.moe, *moe_call(biased, leaves[0], layer.ids, leaves[1]))
    opcheck(OPS.qdq, (layer.x.float().requires_grad_(),))


def test_nothing_is_recorded_where_nothing_needs_a_gradient(runnable: Runnable) -> None:
    layer = make(TINY, device=runnable[0])
    args, options = moe_call(pack(runnable, layer), layer.x, layer.ids, layer.routing)
    assert OPS.moe(*args, **options).grad_fn is None
    args[0].requires_grad_()
    with torch.no_grad():
        assert OPS.moe(*args, **options).grad_fn is None


def test_absent_biases_as_prepare_moe_returns_them(runnable: Runnable) -> None:
    """A bias [E, 0] may need a gradient: it is [E, 0]."""
    device, backend = runnable
    tensors = OPS.prepare_moe(
        *weights(TINY.with_(bias=False), device=device).tensors().values(), layout=backend.layout.tag
    )
    packed = PackedExperts.from_tensors(tensors, backend.layout.tag, 96, 160, Activation())
    args, options = moe_call(packed, *inputs(TINY, torch.float32, device=device))
    args = [*args]
    args[5] = torch.empty(7, 0, device=device, requires_grad=True)
    OPS.moe(*args, **options).sum().backward()
    assert args[5].grad.shape == (7, 0)


# --- another layout ---------------------------------------------------------------------------------------------------


def _interleaving() -> Layout:
    """Gate and up rows in turn, biases too and in float32, the scales of w2 in aux: nothing where canonical has it."""

    def specs(hidden: int, intermediate: int, gated: bool) -> dict[str, TensorSpec]:
        plain = dict(canonical_specs(hidden, intermediate, gated))
        plain["w13_bias"] = replace(plain["w13_bias"], dtype=torch.float32)
        return plain | {"w2_scale": TensorSpec((0,)), "moved": plain["w2_scale"]}

    def move(expert: Any, turn: Any) -> dict[str, Tensor]:
        return {n: turn(t) if n.startswith("w13") else t for n, t in expert.items()}

    def pack(expert: Any, gated: bool) -> dict[str, Tensor]:
        out = move(expert, join_gate_up)
        return out | {"moved": out["w2_scale"], "w2_scale": out["w2"].new_empty(0)}

    def unpack(packed: Any, gated: bool) -> dict[str, Tensor]:
        out = move(packed, split_gate_up)
        out["w2_scale"] = out.pop("moved")
        return out

    return Layout("test.interleaving", 128, 128, specs, pack, unpack)


def test_a_layout_that_moves_everything(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ``pack`` and ``unpack`` know how bytes lie, and the gradient of a bias lies where the bias does."""

    def run(x: Tensor, ids: Tensor, weights: Tensor, packed: Any, activation: Any, **options: Any) -> Tensor:
        return torch.zeros_like(x)  # the forward is not what is tested

    backend = replace(reference.BACKEND, name="interleaving", layout=_interleaving(), run=run)
    monkeypatch.setitem(dispatch._BY_TAG, backend.layout.tag, backend)
    layer: Layer = make(TINY, device=device)
    tensors = OPS.prepare_moe(*layer.experts.tensors().values(), layout=backend.layout.tag)
    packed = PackedExperts.from_tensors(tensors, backend.layout.tag, TINY.hidden, TINY.intermediate, Activation())
    args, options = backward_call(layer, packed)
    x, routing, w13_bias, w2_bias = OPS.moe_backward(*args, **options)
    assert w13_bias.shape == (7, 512) and w2_bias.shape == (7, 128)
    theirs = wanted(layer)
    rows = torch.stack([split_gate_up(row) for row in w13_bias]).unflatten(1, (2, 256))
    assert (rows[:, :, 160:] == 0).all() and (w2_bias[:, 96:] == 0).all()
    ours = {"x": x, "topk_weights": routing, "w13_bias": rows[:, :, :160].flatten(1), "w2_bias": w2_bias[:, :96]}
    assert max(relative(ours[n], theirs[n]) for n in theirs) < 1e-5
    assert found(prepare(layer.experts, prefer="reference"), layer).keys() == ours.keys()
