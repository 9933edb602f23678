"""MXFP4Experts and PackedExperts keep bytes and tag together through every way of saving and copying."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from mxfp4_ops import Activation, MXFP4Experts, PackedExperts, prepare
from mxfp4_ops.backends import Backend
from problems import TINY, inputs, weights
from safetensors.torch import load_file, save_file


@pytest.fixture
def experts(runnable: tuple[str, Backend]) -> MXFP4Experts:
    device, backend = runnable
    packed = prepare(weights(TINY, device=device), activation=Activation("silu", limit=5.0), prefer=backend.name)
    return MXFP4Experts(packed)


def args(experts: MXFP4Experts) -> tuple[torch.Tensor, ...]:
    return inputs(TINY, device=str(experts.w13.device))


def fresh(experts: MXFP4Experts, seed: int = 5) -> MXFP4Experts:
    """A module of the same layout with other weights."""
    other = weights(TINY, seed=seed, device=str(experts.w13.device))
    name = {"canonical": "reference"}.get(experts.layout, "native_cpu")
    return MXFP4Experts(prepare(other, activation=experts.activation, prefer=name))


def test_forward_is_the_op(experts: MXFP4Experts) -> None:
    x, ids, routing = args(experts)
    assert torch.equal(experts(x, ids, routing), experts.packed(x, ids, routing))
    shaped = experts(x.reshape(1, 5, -1), ids.reshape(1, 5, -1), routing.reshape(1, 5, -1))
    assert torch.equal(shaped[0], experts(x, ids, routing)) and shaped.shape == (1, 5, TINY.hidden)


def test_options_of_the_module_are_used(experts: MXFP4Experts) -> None:
    x, ids, routing = args(experts)
    on_input = MXFP4Experts(experts.packed, weight_on_input=True)
    assert torch.equal(on_input(x, ids, routing), experts.packed(x, ids, routing, weight_on_input=True))
    invariant = MXFP4Experts(experts.packed, batch_invariant=True)
    assert torch.equal(invariant(x[:1], ids[:1], routing[:1]), invariant(x, ids, routing)[:1])


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "state_dict", "safetensors"])
def test_t1_copies_give_the_same_bits(experts: MXFP4Experts, how: str, tmp_path: Path) -> None:
    wanted = experts(*args(experts))
    if how == "deepcopy":
        again = copy.deepcopy(experts)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(experts))
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(experts, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    else:
        again = fresh(experts)
        assert not torch.equal(again(*args(experts)), wanted)
        state = experts.state_dict()
        assert all(isinstance(t, torch.Tensor) for t in state.values())
        if how == "safetensors":
            save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "experts.safetensors")
            state = load_file(tmp_path / "experts.safetensors")
        assert again.load_state_dict(state) is not None
    assert torch.equal(again(*args(experts)), wanted)


def test_the_tag_is_in_the_state(experts: MXFP4Experts) -> None:
    text = bytes(experts.state_dict()["_extra_state"].tolist()).decode()
    assert f'"layout": "{experts.layout}"' in text and '"activation": ["silu", null, null, 5.0]' in text


def test_l2_another_layout_is_refused_before_a_byte_is_copied(experts: MXFP4Experts) -> None:
    before = experts.w13.clone()
    state = fresh(experts).state_dict()
    text = bytes(state["_extra_state"].tolist()).decode().replace(experts.layout, "other.v1")
    state["_extra_state"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"layout must be '{experts.layout}', got 'other.v1'.*unprepare"):
        experts.load_state_dict(state)
    assert torch.equal(experts.w13, before)


def test_another_activation_is_refused(experts: MXFP4Experts) -> None:
    other = MXFP4Experts(copy.deepcopy(experts.packed))
    other.activation = Activation("silu", limit=6.0)
    with pytest.raises(ValueError, match=r"must describe .*5\.0.*got .*6\.0"):
        experts.load_state_dict(other.state_dict())


def test_to_moves_and_keeps_integer_bytes(experts: MXFP4Experts) -> None:
    bytes_before = experts.w13.clone()
    moved = copy.deepcopy(experts).to(torch.float32)
    assert torch.equal(moved.w13, bytes_before) and moved.w13.dtype is torch.uint8
    assert moved.w13_bias.dtype is torch.float32
    meta = copy.deepcopy(experts).to("meta")
    assert meta(*(a.to("meta") for a in args(experts))).shape == (TINY.tokens, TINY.hidden)


def test_no_state_but_buffers(experts: MXFP4Experts) -> None:
    names = {n for n, _ in experts.named_buffers()}
    assert names == {"w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias"}
    assert set(experts.state_dict()) == names | {"_extra_state"}
    assert "MXFP4Experts(experts=7, hidden=96" in repr(experts)


def test_absent_biases_are_no_buffers(runnable: tuple[str, Backend]) -> None:
    device, backend = runnable
    experts = MXFP4Experts(prepare(weights(TINY.with_(bias=False), device=device), prefer=backend.name))
    assert set(experts.state_dict()) == {"w13", "w13_scale", "w2", "w2_scale", "_extra_state"}
    assert experts(*args(experts)).shape == (TINY.tokens, TINY.hidden)


def test_packed_experts_are_a_pytree(experts: MXFP4Experts) -> None:
    packed = experts.packed
    leaves, spec = torch.utils._pytree.tree_flatten(packed)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, PackedExperts) and again.layout == packed.layout
    assert torch.equal(again(*args(experts)), packed(*args(experts)))
