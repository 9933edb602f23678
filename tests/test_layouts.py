"""One suite over all layouts, on the CPU, no backend needed: exact inverses, true specs, tags that keep meaning."""

from __future__ import annotations

import hashlib

import pytest
import torch
from mxfp4_ops import BACKENDS, ExpertWeights, PackedExperts, packing, prepare, repack_expert, unprepare
from mxfp4_ops.activation import Activation
from mxfp4_ops.layout import BIASES, SLOTS, Layout, packed_specs
from problems import GPT_OSS, PROBLEMS, TINY, Problem, weights
from torch import Tensor

OPS = torch.ops.mxfp4
LAYOUTS = [b.layout for b in BACKENDS]
# What a seeded stack packs to. A released tag never changes meaning: a new layout gets a new tag and a new line.
GOLDEN = {
    "native_cpu.tile32.v1": "06050c156d519293",
    "canonical": "6db86a96936d4a5e",
}


@pytest.fixture(params=LAYOUTS, ids=[x.tag for x in LAYOUTS])
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


def pack(layout: Layout, experts: ExpertWeights, **options: object) -> list[Tensor]:
    return OPS.prepare_moe(*experts.tensors().values(), layout=layout.tag, **options)


def unpack(layout: Layout, packed: list[Tensor], problem: Problem) -> list[Tensor]:
    sizes = {"hidden": problem.hidden, "intermediate": problem.intermediate, "gated": problem.gated}
    return OPS.unprepare_moe(packed, layout=layout.tag, **sizes)


def same(found: list[Tensor], experts: ExpertWeights) -> bool:
    wanted = [torch.empty(found[0].shape[0], 0) if t is None else t for t in experts.tensors().values()]
    return all(torch.equal(a, b) and (a.dtype == b.dtype or not b.numel()) for a, b in zip(found, wanted, strict=True))


EVERY = [*PROBLEMS, TINY.with_(name="ungated", activation="relu2_no_mul"), GPT_OSS]


@pytest.mark.parametrize("problem", EVERY, ids=[p.name for p in EVERY])
def test_l3_round_trip_gives_the_same_bytes(layout: Layout, problem: Problem) -> None:
    experts = weights(problem, low=0, high=255)
    packed = pack(layout, experts, activation=problem.activation)
    assert same(unpack(layout, packed, problem), experts)


@pytest.mark.parametrize("problem", EVERY, ids=[p.name for p in EVERY])
def test_specs_are_what_pack_returns(layout: Layout, problem: Problem) -> None:
    experts = weights(problem)
    packed = pack(layout, experts, activation=problem.activation)
    specs = packed_specs(layout, problem.hidden, problem.intermediate, problem.gated)
    assert list(specs)[:6] == list(SLOTS) and len(packed) == len(specs)
    inputs = {t.untyped_storage().data_ptr() for t in experts.tensors().values() if t is not None}
    for (name, spec), tensor in zip(specs.items(), packed, strict=True):
        absent = name in BIASES and not problem.bias
        assert tensor.shape == (problem.experts, *((0,) if absent else spec.shape))
        assert absent or tensor.dtype is (torch.bfloat16 if spec.dtype is None else spec.dtype)
        assert tensor.is_contiguous() and (not tensor.numel() or tensor.untyped_storage().data_ptr() not in inputs)


def test_dimension_0_is_the_expert(layout: Layout) -> None:
    """A shard's packed slices are the packed slices of the shard, and one expert packs as it does among others."""
    experts = weights(TINY)
    whole = pack(layout, experts)
    for part in (slice(2, 5), slice(6, 7)):
        shard = ExpertWeights(*(None if t is None else t[part] for t in experts.tensors().values()))
        assert all(torch.equal(a[part], b) for a, b in zip(whole, pack(layout, shard), strict=True))


def test_t2_repack_equals_packing_the_new_bytes(layout: Layout) -> None:
    old, new = weights(TINY, seed=1), weights(TINY, seed=2)
    mixed = ExpertWeights(
        *(torch.cat([a[:3], b[3:4], a[4:]]) for a, b in zip(*(w.tensors().values() for w in (old, new)), strict=True))
    )
    packed = PackedExperts.from_tensors(pack(layout, old), layout.tag, TINY.hidden, TINY.intermediate, Activation())
    one = ExpertWeights(*(None if t is None else t[3] for t in new.tensors().values()))
    repack_expert(packed, 3, one)
    assert all(torch.equal(a, b) for a, b in zip(packed.tensors(), pack(layout, mixed), strict=True))


def test_l1_interleaved_rows_are_the_same_experts(layout: Layout) -> None:
    experts = weights(TINY)
    turns = {n: t for n, t in experts.tensors().items()}
    for name in ("w13", "w13_scale", "w13_bias"):
        gate, up = turns[name].chunk(2, dim=1)
        turns[name] = torch.stack((gate, up), dim=2).flatten(1, 2)
    mixed = ExpertWeights(**turns)
    assert all(
        torch.equal(a, b) for a, b in zip(pack(layout, experts), pack(layout, mixed, interleaved=True), strict=True)
    )
    packed = PackedExperts.from_tensors(pack(layout, experts), layout.tag, TINY.hidden, TINY.intermediate, Activation())
    back = unprepare(packed, interleaved=True)
    assert all(torch.equal(a, b) for a, b in zip(back.tensors().values(), turns.values(), strict=True))


def test_storage_that_starts_anywhere(layout: Layout) -> None:
    """Checkpoint slices may start at any byte, as in a memory-mapped file."""
    experts = weights(TINY)

    def shifted(t: Tensor | None) -> Tensor | None:
        if t is None or t.dtype is not torch.uint8:
            return t
        flat = torch.empty(t.numel() + 1, dtype=torch.uint8)
        flat[1:] = t.flatten()
        return flat[1:].view(t.shape)

    moved = ExpertWeights(*(shifted(t) for t in experts.tensors().values()))
    packed = pack(layout, moved)
    assert all(torch.equal(a, b) for a, b in zip(packed, pack(layout, experts), strict=True))
    again = [shifted(t) for t in packed]
    assert same(unpack(layout, again, TINY), experts)


def test_g1_padding_is_written_and_neutral(layout: Layout) -> None:
    """Packing into memory full of 0xFF gives the same bytes: nothing is left as it was found."""
    experts = weights(TINY.with_(experts=2))
    plain = pack(layout, experts)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert int(torch.empty(4, dtype=torch.uint8)[0]) == 255
        poisoned = pack(layout, experts)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(plain, poisoned, strict=True))


def test_meta_tensors_have_the_shapes(layout: Layout) -> None:
    experts = weights(TINY)
    meta = ExpertWeights(*(None if t is None else t.to("meta") for t in experts.tensors().values()))
    for found, wanted in zip(pack(layout, meta), pack(layout, experts), strict=True):
        assert found.device.type == "meta" and found.shape == wanted.shape and found.dtype is wanted.dtype


def test_y1_view_dtypes_pack_to_the_same_bytes(layout: Layout) -> None:
    experts = weights(TINY)
    views = {
        n: t
        if t is None or n.endswith("bias")
        else t.view(torch.float8_e8m0fnu if n.endswith("scale") else torch.float4_e2m1fn_x2)
        for n, t in experts.tensors().items()
    }
    assert all(
        torch.equal(a, b) for a, b in zip(pack(layout, ExpertWeights(**views)), pack(layout, experts), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_biases_keep_their_dtype(layout: Layout, dtype: torch.dtype) -> None:
    experts = weights(TINY)
    typed = ExpertWeights(**{n: t.to(dtype) if n in BIASES else t for n, t in experts.tensors().items()})
    assert same(unpack(layout, pack(layout, typed), TINY), typed)


def test_tags_are_unique_and_keep_their_meaning(layout: Layout) -> None:
    assert len({x.tag for x in LAYOUTS}) == len(LAYOUTS)
    digest = hashlib.sha256()
    for activation in ("silu", "relu2_no_mul"):
        problem = TINY.with_(activation=activation)
        for tensor in pack(layout, weights(problem, low=0, high=255), activation=activation):
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == GOLDEN[layout.tag]


def test_s3_canonical_experts_are_relabelled_without_a_copy() -> None:
    experts = weights(TINY)
    packed = prepare(experts, prefer="reference")
    assert [t.data_ptr() for t in packed.tensors()] == [
        t.data_ptr() for t in experts.tensors().values() if t is not None
    ]


@pytest.mark.parametrize("name", ["w13_scale", "w2_scale"])
def test_scale_bytes_that_a_layout_decodes_otherwise_are_refused(name: str) -> None:
    """A layout may declare the scale bytes its kernels get right; others are refused, naming where the first is."""
    base = LAYOUTS[0]
    narrow = Layout("narrow.v1", 64, 64, base.specs, base.pack, base.unpack, scale_bytes=range(1, 255))
    held = {n: t for n, t in weights(TINY).tensors().items() if t is not None}
    packing.need_scale_bytes(held, narrow)
    held[name][4, 9, 2] = 255
    packing.need_scale_bytes(held, base)
    with pytest.raises(
        ValueError, match=rf"{name} must hold bytes 1..254 .* got 255 at expert 4, row 9, block 2\. Name"
    ):
        packing.need_scale_bytes(held, narrow)


def test_layouts_with_equal_shapes_are_known() -> None:
    """Bytes under another tag of the same shapes would be garbage that no check sees: such pairs are listed here."""
    pairs = [
        (a.tag, b.tag)
        for i, a in enumerate(LAYOUTS)
        for b in LAYOUTS[:i]
        if packed_specs(a, 256, 256, True) == packed_specs(b, 256, 256, True)
    ]
    assert pairs == []


@pytest.mark.parametrize("gated", [True, False])
def test_tile32_by_its_index_formula(gated: bool) -> None:
    """Every nibble and scale byte of native_cpu.tile32.v1 lies where docs/layouts.md says, padding included."""
    problem = Problem("p", 2, 96, 160, 1, 1, activation="silu" if gated else "relu2_no_mul", bias=False)
    experts = weights(problem)
    w13, _, _, w2, _, _ = pack(
        next(x for x in LAYOUTS if x.tag == "native_cpu.tile32.v1"), experts, activation=problem.activation
    )
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    cases = [(w13, experts.w13, experts.w13_scale, gated, 192), (w2, experts.w2, experts.w2_scale, False, 128)]
    for packed, codes, scales, paired, padded_rows in cases:
        columns = codes.shape[2] * 2
        for tile in range(packed.shape[1]):
            for row in range(32):
                half, lane = divmod(row, 16)
                n = tile * 16 + lane if paired else tile * 32 + row
                inside = n < (codes.shape[1] // 2 if paired else codes.shape[1])
                n = n + half * (codes.shape[1] // 2) if paired else n
                for k in range(0, packed.shape[2] * 64, 37):  # 37: every residue of 64, in time that a test has
                    block = packed[1, tile, k // 64]
                    place = 64 + (k % 64 // 8) * 128 + half * 64 + lane * 4
                    word = int.from_bytes(bytes(block[place : place + 4].tolist()), "little")
                    nibble = word >> 4 * order.index(k % 8) & 15
                    present = inside and k < columns
                    assert nibble == (int(codes[1, n, k // 2]) >> 4 * (k % 2) & 15 if present else 0)
                    scale = int(block[k % 64 // 32 * 32 + row])
                    assert scale == (int(scales[1, n, k // 32]) if present else 127)
        assert packed.shape[1] * 32 == padded_rows * (2 if paired else 1)
