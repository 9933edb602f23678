"""Rules L, T and Y of docs/rules.md that no other suite shows by itself: layouts, updates, dtypes that are views."""

from __future__ import annotations

import dataclasses

import mxfp4_ops
import pytest
import torch
from mxfp4_ops import Activation, ExpertWeights, MXFP4Experts, PackedExperts, prepare, repack_expert, unprepare
from mxfp4_ops.backends import Backend
from problems import TINY, inputs, weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OPS = torch.ops.mxfp4
Runnable = tuple[str, Backend]
VIEWS = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


def views(experts: ExpertWeights) -> ExpertWeights:
    """The same bytes as checkpoints of other packages type them."""
    typed = {n: t for n, t in experts.tensors().items()}
    for name in ("w13", "w2"):
        typed[name] = typed[name].view(VIEWS[1])
        typed[f"{name}_scale"] = typed[f"{name}_scale"].view(VIEWS[0])
    return ExpertWeights(**typed)


def test_l1_the_order_of_gate_and_up_is_an_argument(runnable: Runnable) -> None:
    """The same logical weights in both orders give the same bits; declared wrongly, they give others."""
    device, backend = runnable
    experts, args = weights(TINY, device=device), inputs(TINY, device=device)
    in_turn = unprepare(prepare(experts, prefer=backend.name), interleaved=True)
    assert torch.equal(in_turn.w13[:, 0::2], experts.w13[:, :160]) and torch.equal(
        in_turn.w13[:, 1], experts.w13[:, 160]
    )
    wanted = prepare(experts, prefer=backend.name)(*args)
    assert torch.equal(prepare(in_turn, prefer=backend.name, interleaved=True)(*args), wanted)
    assert not torch.equal(prepare(in_turn, prefer=backend.name)(*args), wanted)


def test_l2_bytes_run_under_their_own_tag_only() -> None:
    """Every pair of layouts: the other's bytes are refused by the op, by repacking and by getting them back."""
    for backend in mxfp4_ops.BACKENDS:
        packed = prepare(weights(TINY), prefer=backend.name)
        with pytest.raises(TypeError, match=rf"must be canonical.*{packed.layout}"):
            prepare(packed)
        for other in mxfp4_ops.BACKENDS:
            if other is backend:
                continue
            wrong = dataclasses.replace(packed, layout=other.layout.tag)
            one = ExpertWeights(*(t[0] for t in weights(TINY).tensors().values()))
            for call in (lambda w: w(*inputs(TINY)), unprepare, lambda w, e=one: repack_expert(w, 0, e)):
                with pytest.raises(ValueError, match=r"w13 must be .*, got"):
                    call(wrong)


def test_l2_other_sizes_than_the_packed_ones_are_refused(runnable: Runnable) -> None:
    """96 and 128 pad to the same bytes: the sizes that travel with them decide, and x has to have them."""
    device, backend = runnable
    packed = prepare(weights(TINY, device=device), prefer=backend.name)
    x, ids, wts = inputs(TINY.with_(hidden=128), device=device)
    with pytest.raises(ValueError, match=r"H = hidden = 96, got \[5, 128\]"):
        packed(x, ids, wts)


def test_l5_ggml_blocks_by_hand() -> None:
    """A GGML block is a scale byte, then 16 bytes with element j in the low and j + 16 in the high nibble. There is no
    importer: docs/rules.md has these two lines."""
    raw = torch.tensor([[127, *[(j % 8) | (7 - j % 8) << 4 for j in range(16)]]], dtype=torch.uint8)
    codes = torch.cat((raw[:, 1:] & 15, raw[:, 1:] >> 4), 1)
    blocks, scales = codes[:, 0::2] | codes[:, 1::2] << 4, raw[:, :1]
    out = OPS.dequant(blocks, scales, dtype=torch.float32)[0]
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert out.tolist() == magnitudes * 2 + magnitudes[::-1] * 2


def test_t1_packed_tensors_are_ordinary(runnable: Runnable) -> None:
    """Of torch's own type, with storage of their own, and together not smaller than codes and scales."""
    device, backend = runnable
    packed = prepare(weights(TINY, device=device), prefer=backend.name)
    held = [t for t in packed.tensors() if t.numel()]
    assert all(type(t) is Tensor and t.is_contiguous() for t in held)
    assert len({t.untyped_storage().data_ptr() for t in held}) == len(held)
    assert packed.nbytes() >= 7 * 3 * 96 * 160 * 17 // 32 and packed.nbytes() == sum(t.nbytes for t in held)
    params = MXFP4Experts(packed)
    assert set(params.state_dict()) == {n for n, _ in params.named_buffers()} | {"_extra_state"}


def test_t2_an_update_in_place_rewrites_padding_too(runnable: Runnable) -> None:
    device, backend = runnable
    old, new = (prepare(weights(TINY, seed=s, device=device), prefer=backend.name) for s in (1, 2))
    module, fresh = MXFP4Experts(old), weights(TINY, seed=2, device=device)
    pointers = [t.data_ptr() for t in module.packed.tensors()]
    for tensor in old.tensors():
        tensor.view(torch.uint8).fill_(255)
    for e in range(7):
        repack_expert(module.packed, e, ExpertWeights(*(t[e] for t in fresh.tensors().values())))
    assert [t.data_ptr() for t in module.packed.tensors()] == pointers
    assert all(torch.equal(a, b) for a, b in zip(module.packed.tensors(), new.tensors(), strict=True))
    args = inputs(TINY, device=device)
    assert torch.equal(module(*args), new(*args))


class ViewsOnly(TorchDispatchMode):
    """Fails when an op computes with, copies or converts a tensor of a view dtype."""

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = str(func)
        if any(t.dtype in VIEWS for t in tensors) and not name.startswith("mxfp4."):
            moves_no_byte = ("view.dtype", "unsqueeze", "select", "slice", "alias", "detach")
            assert any(word in name for word in moves_no_byte), name
        return func(*args, **(kwargs or {}))


def test_y1_bytes_are_taken_in_both_dtypes_everywhere(runnable: Runnable) -> None:
    device, backend = runnable
    experts, args = weights(TINY, device=device), inputs(TINY, device=device)
    packed = prepare(experts, prefer=backend.name)
    assert torch.equal(prepare(views(experts), prefer=backend.name)(*args), packed(*args))
    blocks, scales = OPS.quant(torch.randn(3, 96, device=device))
    assert blocks.dtype is scales.dtype is torch.uint8
    assert torch.equal(OPS.dequant(blocks.view(VIEWS[1]), scales.view(VIEWS[0])), OPS.dequant(blocks, scales))
    held = dataclasses.replace(packed, w13=packed.w13.view(VIEWS[1]), w2=packed.w2.view(VIEWS[1]))
    assert torch.equal(held(*args), packed(*args))
    back = OPS.unprepare_moe(held.tensors(), layout=packed.layout, hidden=96, intermediate=160)
    assert torch.equal(back[0], experts.w13) and back[0].dtype is torch.uint8
    if packed.layout == "canonical":  # a stack in the view dtypes is written as bytes, too
        stack = [
            t.clone().view(d) for t, d in zip(packed.tensors(), (VIEWS[1], VIEWS[0], torch.bfloat16) * 2, strict=True)
        ]
        OPS.repack_expert(stack, 2, *(t[5] for t in experts.tensors().values()), layout="canonical")
        assert torch.equal(stack[1].view(torch.uint8)[2], experts.w13_scale[5])


def test_y2_bytes_are_viewed_and_never_converted(runnable: Runnable) -> None:
    """torch's own conversion makes byte 129 of 5. Every byte comes back, and no op but a view meets the dtypes."""
    device, backend = runnable
    experts = weights(TINY, low=0, high=255, device=device)
    with ViewsOnly():
        packed = prepare(views(experts), prefer=backend.name)
        one = ExpertWeights(*(t[6] for t in views(experts).tensors().values()))
        if packed.layout != "canonical":  # a canonical stack is the caller's own tensors
            repack_expert(packed, 0, one)
        OPS.dequant(experts.w2.view(VIEWS[1]), experts.w2_scale.view(VIEWS[0]))
    back = unprepare(packed)
    wanted = [0 if packed.layout == "canonical" else 6, *range(1, 7)]
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        assert torch.equal(getattr(back, name), getattr(experts, name)[wanted]), name


def test_t1_from_tensors_is_the_inverse_of_tensors(runnable: Runnable) -> None:
    device, backend = runnable
    for bias in (True, False):
        packed = prepare(weights(TINY.with_(bias=bias), device=device), prefer=backend.name)
        again = PackedExperts.from_tensors(packed.tensors(), packed.layout, 96, 160, Activation())
        assert (again.w13_bias is None) is (not bias)
        assert torch.equal(again(*inputs(TINY, device=device)), packed(*inputs(TINY, device=device)))
