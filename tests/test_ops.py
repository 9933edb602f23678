"""Every op: opcheck, shapes, strides, dtypes, strided inputs, T = 0, 1, 5."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mxfp4_ops
import pytest
import torch
from mxfp4_ops import Activation, PackedExperts, _schemas, prepare
from mxfp4_ops.backends import Backend
from mxfp4_ops.moe_call import MoECall
from mxfp4_ops.route_call import RouteCall
from mxfp4_ops.routing import METHODS
from problems import TINY, Problem, inputs, moe_call, weights
from torch import Tensor

OPS = torch.ops.mxfp4
ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# opcheck itself multiplies or copies its arguments, which e8m0 and float4 tensors cannot do on a CPU.
VIEW_CHECKS = ("test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, checks: Any = ALL_CHECKS) -> None:
    op = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op  # opcheck takes no op with overloads
    results = torch.library.opcheck(op, args, kwargs or {}, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}, results


def strided(t: Tensor) -> Tensor:
    """The same values with gaps between them."""
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] * 2, dtype=t.dtype, device=t.device)
    wide[..., ::2] = t
    return wide[..., ::2]


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_c1_opcheck_moe(runnable: tuple[str, Backend], tokens: int, bias: bool, ids_dtype: torch.dtype) -> None:
    device, backend = runnable
    problem = TINY.with_(tokens=tokens, bias=bias, hidden=64, intermediate=32)
    packed = prepare(weights(problem, device=device), prefer=backend.name)
    x, ids, routing = inputs(problem, device=device)
    opcheck(OPS.moe, *moe_call(packed, x, ids.to(ids_dtype), routing))
    opcheck(OPS.moe, *moe_call(packed, strided(x), strided(ids.to(ids_dtype)), strided(routing)))
    if tokens == 5:
        opcheck(OPS.mxfp4_moe, *moe_call(packed, x, ids.to(ids_dtype), routing))
        opcheck(OPS.moe, *moe_call(packed, x.float().requires_grad_(), ids, routing), checks=("test_faketensor",))


def test_c1_opcheck_moe_with_expert_ids_and_views(runnable: tuple[str, Backend]) -> None:
    device, backend = runnable
    problem = TINY.with_(hidden=64, intermediate=32)
    packed = prepare(weights(problem, device=device), prefer=backend.name)
    args, kwargs = moe_call(packed, *inputs(problem, device=device))
    order = torch.tensor([6, 2, 9, 0, 4, 3, 11], dtype=torch.int32, device=device)
    opcheck(OPS.moe, (*args, order), kwargs)
    views = list(args)
    for place, dtype in ((3, torch.float4_e2m1fn_x2), (4, torch.float8_e8m0fnu), (6, torch.float4_e2m1fn_x2)):
        views[place] = args[place].view(dtype)
    opcheck(OPS.moe, tuple(views), kwargs, VIEW_CHECKS)
    assert torch.equal(OPS.moe(*views, **kwargs), OPS.moe(*args, **kwargs))


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (5, 96), (2, 3, 64)])
def test_c1_opcheck_quant_dequant_qdq(device: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device)
    blocks, scales = OPS.quant(x)
    for rule in ("even", "ceil"):
        opcheck(OPS.quant, (x,), {"scale_rule": rule})
        opcheck(OPS.qdq, (x.bfloat16(),), {"scale_rule": rule})
    opcheck(OPS.quant, (strided(x),))
    opcheck(OPS.qdq, (strided(x.half()),))
    for dtype in (None, torch.float32, torch.float16):
        opcheck(OPS.dequant, (blocks, scales), {"dtype": dtype})
    opcheck(OPS.dequant, (strided(blocks), strided(scales)))
    opcheck(OPS.dequant, (blocks.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)), None, VIEW_CHECKS)
    opcheck(OPS.dequant_mxfp4, (blocks, scales, torch.float32))
    opcheck(OPS.qdq_mxfp4, (x, "floor"))


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (5, 96)])
def test_c1_opcheck_dequant_out(device: str, shape: tuple[int, ...]) -> None:
    blocks, scales = OPS.quant(torch.randn(shape, device=device))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.zeros(shape, dtype=dtype, device=device)
        opcheck(OPS.dequant.out, (blocks, scales), {"out": out.clone()})
        opcheck(OPS.dequant.out, (strided(blocks), strided(scales)), {"out": out.clone()})
        if device == "cpu":
            opcheck(OPS._native_dequant_out, (blocks, scales, out.clone()))


def test_l4_strided_inputs_give_the_same_numbers(runnable: tuple[str, Backend]) -> None:
    device, backend = runnable
    x = torch.randn(4, 64, device=device)
    assert torch.equal(OPS.qdq(x.t().contiguous().t()), OPS.qdq(x))
    blocks, scales = OPS.quant(x)
    assert torch.equal(OPS.dequant(strided(blocks), strided(scales)), OPS.dequant(blocks, scales))
    packed, args = prepare(weights(TINY, device=device), prefer=backend.name), inputs(TINY, device=device)
    assert torch.equal(packed(*map(strided, args)), packed(*args))
    experts = weights(TINY, device=device)
    gaps = type(experts)(*(None if t is None else strided(t) for t in experts.tensors().values()))
    again = prepare(gaps, prefer=backend.name)
    assert torch.equal(again(*args), packed(*args))


@pytest.mark.parametrize("activation", ["swigluoai", "silu_no_mul"])
@pytest.mark.parametrize("bias", [True, False])
def test_c1_opcheck_prepare_unprepare_repack(runnable: tuple[str, Backend], activation: str, bias: bool) -> None:
    device, backend = runnable
    problem = TINY.with_(bias=bias, activation=activation, experts=2)
    six = tuple(weights(problem, device=device).tensors().values())
    options = {"layout": backend.layout.tag, "activation": activation}
    opcheck(OPS.prepare_moe, six, {**options, "interleaved": problem.gated})
    packed = OPS.prepare_moe(*six, **options)
    sizes = {"hidden": problem.hidden, "intermediate": problem.intermediate, "gated": problem.gated}
    opcheck(OPS.unprepare_moe, (packed,), {"layout": backend.layout.tag, **sizes})
    one = tuple(None if t is None else t[1] for t in six)
    opcheck(OPS.repack_expert, (packed, 0, *one), options)  # on copies
    before = [t.data_ptr() for t in packed]
    OPS.repack_expert(packed, 0, *one, **options)
    assert [t.data_ptr() for t in packed] == before
    again = OPS.unprepare_moe(packed, layout=backend.layout.tag, **sizes)
    for found, given in zip(again, six, strict=True):
        assert found.numel() == 0 if given is None else torch.equal(found, torch.stack([given[1], given[1]]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_c1_opcheck_localise(device: str, dtype: torch.dtype) -> None:
    ids = torch.tensor([[3, -1, 7], [9, 0, 3]], dtype=dtype, device=device)
    mine = torch.tensor([7, 3, 20], dtype=torch.int32, device=device)
    opcheck(OPS.localise, (ids, mine))
    assert OPS.localise(ids, mine).tolist() == [[1, -1, 0], [-1, -1, 1]]
    assert OPS.localise(ids, mine).dtype is dtype
    assert (OPS.localise(strided(ids), mine[:0]) == -1).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_c1_opcheck_route(device: str, method: str, tokens: int) -> None:
    logits, bias = torch.randn(tokens, 8, device=device), torch.randn(8, device=device)
    options = {"method": method, "renormalize": METHODS[method].renormalize is not False}
    opcheck(OPS.route, (logits, None, None, None, 3), options)
    opcheck(OPS.route, (strided(logits).bfloat16(), None, None, None, 8), {**options, "scale": 2.5})
    if METHODS[method].bias:
        opcheck(OPS.route, (logits, strided(bias), None, None, 3), {**options, "renormalize": False})
    if METHODS[method].groups:
        opcheck(OPS.route, (logits, bias, None, None, 3), {**options, "groups": 4, "topk_groups": 2})
    if METHODS[method].hash_table:
        ids = torch.arange(tokens, device=device) % 4
        table = torch.randint(8, (4, 3), dtype=torch.int32, device=device)
        opcheck(OPS.route, (logits, None, strided(ids), strided(table), 3), options)


def test_leaves_have_true_fakes() -> None:
    """A graph that was decomposed to leaves sees the same shapes as the public op."""
    x = torch.randn(3, 64)
    blocks, scales = OPS.quant(x)
    kernels = torch._C._dispatch_has_kernel_for_dispatch_key
    assert kernels("mxfp4::_native_moe", "CPU"), "the compiled library is part of the tested package"
    for op, args in (
        (OPS._native_quant, (x, 0)),
        (OPS._native_dequant, (blocks, scales, 1)),
        (OPS._native_qdq, (x, 2)),
        (OPS._native_route, (x, torch.zeros(64), None, 4, 1, 8, 2, True, 2.0)),
        (OPS._native_route, (x, None, torch.tensor([[3], [-1], [63]], dtype=torch.int32), 1, 2, 1, 1, False, 1.0)),
    ):
        opcheck(op, args)


def fake_arguments(call: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(call).parameters.values()]


@pytest.mark.parametrize(("name", "call"), [("moe", MoECall), ("route", RouteCall)])
def test_call_records_have_the_schema_s_arguments(name: str, call: Any) -> None:
    schema = getattr(OPS, name).default._schema
    assert [a.name for a in schema.arguments] == fake_arguments(call)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    assert {n: p.default for n, p in inspect.signature(call).parameters.items() if n in defaults} == defaults


def test_moe_backward_has_the_arguments_of_moe() -> None:
    forward, backward = (
        [(a.name, str(a.type), a.default_value, a.kwarg_only) for a in getattr(OPS, name).default._schema.arguments]
        for name in ("moe", "moe_backward")
    )
    assert [a[0] for a in backward if a not in forward] == ["grad_output", "output_mask"]
    assert [a for a in backward if a in forward] == forward


def test_every_op_of_the_contract_is_there() -> None:
    for name, schema in (_schemas.PUBLIC | _schemas.ALIASES | _schemas.LEAVES).items():
        op, _, overload = name.partition(".")
        found = str(getattr(getattr(OPS, op), overload or "default")._schema)
        assert found == str(torch._C.parse_schema(f"mxfp4::{name}{schema}"))


def test_python_functions_call_the_ops(runnable: tuple[str, Backend]) -> None:
    device, backend = runnable
    x = torch.randn(3, 64, device=device)
    blocks, scales = mxfp4_ops.quant_mxfp4(x, "ceil")
    assert torch.equal(blocks, OPS.quant(x, scale_rule="ceil")[0])
    assert torch.equal(
        mxfp4_ops.dequant_mxfp4(blocks, scales, torch.float32), OPS.dequant(blocks, scales, dtype=torch.float32)
    )
    assert torch.equal(mxfp4_ops.dequant_mxfp4(blocks, scales), OPS.dequant_mxfp4(blocks, scales, torch.bfloat16))
    assert torch.equal(mxfp4_ops.qdq_mxfp4(x, "ceil"), OPS.qdq_mxfp4(x, "ceil"))
    packed, inp = prepare(weights(TINY, device=device), prefer=backend.name), inputs(TINY, device=device)
    args, kwargs = moe_call(packed, *inp)
    assert torch.equal(mxfp4_ops.mxfp4_moe(*args, **kwargs), packed(*inp))
    ids = torch.tensor([[5, -1]], device=device)
    assert mxfp4_ops.localise(ids, torch.tensor([5], dtype=torch.int32, device=device)).tolist() == [[0, -1]]


def test_packed_list_from_the_op_runs(runnable: tuple[str, Backend]) -> None:
    """prepare_moe returns an absent bias as [E, 0]; moe takes it as that."""
    device, backend = runnable
    problem: Problem = TINY.with_(bias=False)
    tensors = OPS.prepare_moe(*weights(problem, device=device).tensors().values(), layout=backend.layout.tag)
    inp = inputs(problem, device=device)
    sizes = {"layout": backend.layout.tag, "hidden": problem.hidden, "intermediate": problem.intermediate}
    out = OPS.moe(*inp, *tensors[:6], tensors[6:], **sizes)
    packed = PackedExperts.from_tensors(tensors, backend.layout.tag, problem.hidden, problem.intermediate, Activation())
    assert torch.equal(out, packed(*inp))
