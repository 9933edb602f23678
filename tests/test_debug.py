"""``debug()`` finds the first bad value of a call and says layer, tensor, expert and place; outside it nothing
changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from mxfp4_ops import MXFP4Experts, PackedExperts, debug, prepare, quant_x
from mxfp4_ops.backends import Backend
from problems import TINY, inputs, weights
from torch import Tensor

OPS = torch.ops.mxfp4
Args = tuple[Tensor, Tensor, Tensor]


def with_scale_byte(device: str, backend: Backend, name: str, expert: int, row: int, block: int) -> PackedExperts:
    w = weights(TINY, device=device)
    getattr(w, name)[expert, row, block] = 255
    return prepare(w, prefer=backend.name)


class Model(torch.nn.Module):
    """Two layers of experts under names that a message should give."""

    def __init__(self, packed: PackedExperts, last: PackedExperts) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([MXFP4Experts(packed), MXFP4Experts(last)])

    def forward(self, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, ids, routing)
        return x


def test_good_calls_pass_with_the_same_bits(runnable: tuple[str, Backend]) -> None:
    device, backend = runnable
    packed, args = prepare(weights(TINY, device=device), prefer=backend.name), inputs(TINY, device=device)
    wanted, rows = packed(*args), packed.unfinalized(*args)
    out = torch.empty_like(wanted)
    order = torch.tensor([9, 3, 0, 6, 2, 5, 1], dtype=torch.int32, device=device)
    elsewhere = packed(*args, expert_ids=order)
    routing = torch.where(args[1] < 0, math.nan, args[2])  # NaN where no expert is
    with debug():
        assert torch.equal(packed(*args), wanted)
        assert torch.equal(packed(*args, out=out), wanted)
        assert torch.equal(packed.unfinalized(*args)[0], rows[0])
        assert torch.equal(packed(*args, expert_ids=order), elsewhere)
        assert torch.equal(packed(*args[:2], routing), wanted)
        assert packed(*(a[:0] for a in args)).shape == (0, TINY.hidden)
    assert torch.equal(packed(*args), wanted)


def at(tensor: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


BAD_INPUTS: list[tuple[Callable[[Args], Args], str]] = [
    (lambda a: (at(a[0], (3, 7), math.nan), a[1], a[2]), "x must be finite, got nan at [3, 7]."),
    (lambda a: (at(a[0], (4, 0), -math.inf), a[1], a[2]), "x must be finite, got -inf at [4, 0]."),
    (lambda a: (a[0], at(a[1], (2, 1), 7), a[2]),
     "topk_ids must be -1 (skip) or an expert below E = 7, got 7 at [2, 1]."),
    (lambda a: (a[0], at(a[1], (0, 3), -2), a[2]),
     "topk_ids must be -1 (skip) or an expert below E = 7, got -2 at [0, 3]."),
    (lambda a: (a[0], a[1].abs(), at(a[2], (1, 2), math.nan)), "topk_weights must be finite, got nan at [1, 2]."),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), BAD_INPUTS, ids=[s for _, s in BAD_INPUTS])
def test_bad_inputs(runnable: tuple[str, Backend], change: Callable[[Args], Args], sentence: str) -> None:
    device, backend = runnable
    packed, args = prepare(weights(TINY, device=device), prefer=backend.name), inputs(TINY, device=device)
    with debug(), pytest.raises(ValueError) as raised:
        packed(*change(args))
    assert str(raised.value) == f"mxfp4_ops.debug: {sentence}"


@pytest.mark.parametrize(("name", "row", "block"), [("w13_scale", 200, 2), ("w2_scale", 95, 4)])
def test_a_nan_scale_byte(runnable: tuple[str, Backend], name: str, row: int, block: int) -> None:
    device, backend = runnable
    x, ids, routing = inputs(TINY, device=device)
    packed = with_scale_byte(device, backend, name, 5, row, block)
    message = f"{name} of expert 5 must hold no scale byte 255, which is NaN, got 255 at [{row}, {block}]."
    with debug():
        packed(x, torch.where(ids == 5, 4, ids), routing)  # not used: not looked at
        with pytest.raises(ValueError) as raised:
            packed(x, torch.full_like(ids, 5), routing)
    assert str(raised.value) == f"mxfp4_ops.debug: {message}"


def test_a_nan_bias(runnable: tuple[str, Backend]) -> None:
    device, backend = runnable
    w = weights(TINY, device=device)
    assert w.w2_bias is not None
    w.w2_bias[3, 17] = math.nan
    packed, (x, ids, routing) = prepare(w, prefer=backend.name), inputs(TINY, device=device)
    with debug(), pytest.raises(ValueError, match=r"w2_bias of expert 3 must be finite, got nan at \[17\]"):
        packed(x, torch.full_like(ids, 3), routing)


def test_the_layer_is_named(runnable: tuple[str, Backend]) -> None:
    device, backend = runnable
    good = prepare(weights(TINY, device=device), prefer=backend.name)
    model = Model(good, with_scale_byte(device, backend, "w2_scale", 0, 1, 2))
    x, ids, routing = inputs(TINY, device=device)
    with debug(), pytest.raises(ValueError, match=r"mxfp4_ops.debug: layer 'Model.layers.1': w2_scale of expert 0 "):
        model(x, ids.clamp_min(0) * 0, routing)
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks


def test_a_result_that_overflows(runnable: tuple[str, Backend]) -> None:
    device, backend = runnable
    packed, (x, ids, routing) = prepare(weights(TINY, device=device), prefer=backend.name), inputs(TINY, device=device)
    with debug(), pytest.raises(ValueError, match=r"the result must be finite, got (nan|-?inf) at"):
        packed((x * 1e30).float(), ids, routing * 1e30)


def test_expert_ids_that_repeat_are_found_on_every_device(runnable: tuple[str, Backend]) -> None:
    device, backend = runnable
    packed, args = prepare(weights(TINY, device=device), prefer=backend.name), inputs(TINY, device=device)
    order = torch.tensor([0, 1, 2, 3, 4, 5, 5], dtype=torch.int32, device=device)
    with debug(), pytest.raises(ValueError, match="expert_ids must not repeat, got 5 more than once"):
        packed(*args, expert_ids=order)


def test_tags_and_shapes_keep_their_sentences() -> None:
    packed, args = prepare(weights(TINY), prefer="reference"), inputs(TINY)
    with debug():
        with pytest.raises(ValueError, match="layout must be one of"):
            dataclasses.replace(packed, layout="gone.v1")(*args)
        with pytest.raises(ValueError, match="w2 must be"):
            dataclasses.replace(packed, w2=packed.w2[:, 1:])(*args)


def test_tags_and_shapes_name_the_layer(device: str) -> None:
    packed, args = prepare(weights(TINY, device=device), prefer="reference"), inputs(TINY, device=device)
    model = Model(packed, dataclasses.replace(packed, w2_scale=packed.w2_scale[:, 1:]))
    with (
        debug(),
        pytest.raises(ValueError, match=r"^mxfp4_ops.debug: layer 'Model.layers.1': mxfp4::moe: w2_scale must"),
    ):
        model(*args)


def test_a_nan_scale_byte_beside_static_scales(device: str) -> None:
    w, (x, ids, routing) = weights(TINY, device=device), inputs(TINY, device=device)
    w.w2_scale[5, 3, 1] = 255
    ones = torch.ones(TINY.experts, device=device)
    packed = dataclasses.replace(prepare(w, prefer="reference"), w13_input_scale=ones, w2_input_scale=ones)
    with debug(), pytest.raises(ValueError, match=r"w2_scale of expert 5 must hold no scale byte 255.* at \[3, 1\]"):
        packed(x, torch.full_like(ids, 5), routing, x_format="fp8_static")


def test_quantized_x(device: str) -> None:
    packed, (x, ids, routing) = prepare(weights(TINY, device=device), prefer="reference"), inputs(TINY, device=device)
    data, scale = quant_x(x, "mxfp8")
    with debug():
        packed(data, ids, routing, x_scale=scale, x_format="mxfp8")
        scale[2, 1] = 255
        with pytest.raises(ValueError, match=r"x must be finite, got nan at \[2, 32\]"):
            packed(data, ids, routing, x_scale=scale, x_format="mxfp8")
