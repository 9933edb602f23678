"""Experts on disk: bytes come back, the tag travels, and whatever is wrong with a file is said in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mxfp4_ops import BACKENDS, Activation, ExpertWeights, PackedExperts, prepare, unprepare
from mxfp4_ops.checkpoint import Checkpoint, load_packed, read_gpt_oss_experts, save_packed
from problems import TINY, inputs, weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

GPT_OSS = Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0)


def packed_by(backend: str, *, bias: bool = True) -> PackedExperts:
    return prepare(weights(TINY.with_(bias=bias)), activation=GPT_OSS, prefer=backend)


def names_of(packed: PackedExperts) -> dict[str, object]:
    return {n: v for n, v in vars(packed).items() if not isinstance(v, Tensor | tuple)}


def equal(a: PackedExperts, b: PackedExperts) -> bool:
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs) and names_of(a) == names_of(b)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backend", [b.name for b in BACKENDS])
def test_packed_experts_come_back_byte_for_byte(tmp_path: Path, backend: str, bias: bool) -> None:
    packed = packed_by(backend, bias=bias)
    save_packed(packed, tmp_path / "experts.safetensors")
    loaded = load_packed(tmp_path / "experts.safetensors")
    assert equal(loaded, packed)
    x, ids, topk_weights = inputs(TINY)
    assert torch.equal(loaded(x, ids, topk_weights), packed(x, ids, topk_weights))


def test_an_aux_tensor_travels(tmp_path: Path) -> None:
    """No layout of ours has one yet, so loading refuses it; the file has it."""
    packed = replace(packed_by("reference"), aux=(torch.arange(7).view(7, 1),))
    save_packed(packed, tmp_path / "x")
    assert torch.equal(load_file(tmp_path / "x")["aux0"], packed.aux[0])
    with pytest.raises(ValueError, match="found also aux0"):
        load_packed(tmp_path / "x")


def test_metadata_says_what_the_bytes_are(tmp_path: Path) -> None:
    save_packed(packed_by("reference"), tmp_path / "x")
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert file.metadata() == {
            "mxfp4.version": "1",
            "mxfp4.layout": "canonical",
            "mxfp4.hidden": "96",
            "mxfp4.intermediate": "160",
            "mxfp4.activation": "swigluoai",
            "mxfp4.alpha": "1.702",
            "mxfp4.beta": "1.0",
            "mxfp4.limit": "7.0",
        }


def rewrite(path: Path, tensors: Callable[[dict[str, Tensor]], object], **metadata: str | None) -> None:
    """Save the reference's packed experts, changed: ``tensors`` edits the dict in place, None drops a metadata key."""
    save_packed(packed_by("reference"), path)
    with safe_open(path, framework="pt") as file:
        meta = file.metadata() | {f"mxfp4.{k}": v for k, v in metadata.items()}
    held = {n: t.clone() for n, t in load_file(path).items()}
    tensors(held)
    save_file(held, path, metadata={k: v for k, v in meta.items() if v is not None})


def nothing(tensors: dict[str, Tensor]) -> None:
    """Leave the tensors alone."""


BAD_METADATA = [
    ({"layout": "marlin.v9"}, f"layout must be one of {', '.join(b.layout.tag for b in BACKENDS)}, got 'marlin.v9'."),
    ({"layout": None}, "metadata must have mxfp4.layout, found ['mxfp4.activation', 'mxfp4.alpha'"),
    ({"version": "2"}, "metadata mxfp4.version must be 1, got '2'."),
    ({"hidden": "wide"}, "metadata mxfp4.hidden must be a number, got 'wide'."),
    ({"hidden": "128"}, "w13 must be [E, S*I, H/2] = [7, 320, 64], got [7, 320, 48]."),
    ({"layout": "native_cpu.tile32.v1"}, "w13 must be packed as layout 'native_cpu.tile32.v1' needs it,"),
    ({"activation": "swish"}, "activation must be one of silu,"),
    ({"limit": "-1"}, "limit must be a positive number"),
]


@pytest.mark.parametrize(("metadata", "sentence"), BAD_METADATA, ids=[str(m) for m, _ in BAD_METADATA])
def test_wrong_metadata_is_refused(tmp_path: Path, metadata: dict[str, str | None], sentence: str) -> None:
    path = tmp_path / "experts.safetensors"
    rewrite(path, nothing, **metadata)
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        load_packed(path)
    assert str(path) in str(error.value)


BAD_TENSORS: list[tuple[Callable[[dict[str, Tensor]], object], type[Exception], str]] = [
    (lambda t: t.pop("w2"), ValueError, "must hold tensor w2, found w13, w13_bias, w13_scale, w2_bias, w2_scale."),
    (lambda t: t.update(w3=t["w2"].clone()), ValueError, "w2_scale, w2_bias only, found also w3."),
    (
        lambda t: t.update(w2=t["w2"][:, :, :-1].clone()),
        ValueError,
        "w2 must be [E, H, I/2] = [7, 96, 80], got [7, 96, 79].",
    ),
    (lambda t: t.update(w2=t["w2"].short()), TypeError, "w2 must be uint8 or float4_e2m1fn_x2, got int16."),
    (lambda t: t.update(w2_bias=t["w2_bias"].int()), TypeError, "w2_bias must be a float dtype, got int32."),
]


@pytest.mark.parametrize(("change", "kind", "sentence"), BAD_TENSORS, ids=[s for *_, s in BAD_TENSORS])
def test_wrong_tensors_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], kind: type[Exception], sentence: str
) -> None:
    path = tmp_path / "experts.safetensors"
    rewrite(path, change)
    with pytest.raises(kind, match=re.escape(sentence)) as error:
        load_packed(path)
    assert str(path) in str(error.value)


def test_a_truncated_file_names_the_tensor_it_stops_in(tmp_path: Path) -> None:
    path = tmp_path / "experts.safetensors"
    save_packed(packed_by("reference"), path)
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    sentence = (
        rf"must be a whole safetensors file, found {len(data) - 10} bytes, but tensor \w+ ends at byte {len(data)}\."
    )
    with pytest.raises(ValueError, match=sentence):
        load_packed(path)
    path.write_bytes(data[:20])
    with pytest.raises(ValueError, match=r"found 20 bytes, fewer than its header needs \(\d+\)\."):
        load_packed(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"needs the file .*experts\.safetensors, found none\."):
        load_packed(tmp_path / "experts.safetensors")


PREFIX = "model.layers.{}.mlp.experts."


def gpt_oss_tensors(layer: int) -> tuple[ExpertWeights, dict[str, Tensor]]:
    """Experts, and the tensors that a gpt-oss checkpoint has of them."""
    w = weights(TINY, seed=layer)
    assert w.w13_bias is not None and w.w2_bias is not None
    named = {
        "gate_up_proj_blocks": w.w13.unflatten(2, (-1, 16)),
        "gate_up_proj_scales": w.w13_scale,
        "gate_up_proj_bias": w.w13_bias,
        "down_proj_blocks": w.w2.unflatten(2, (-1, 16)),
        "down_proj_scales": w.w2_scale,
        "down_proj_bias": w.w2_bias,
    }
    return w, {PREFIX.format(layer) + name: tensor for name, tensor in named.items()}


def write(folder: Path, *, sharded: bool, **changes: Tensor | None) -> list[ExpertWeights]:
    """Two layers; ``changes`` replace tensors of layer 1, None drops one."""
    experts, tensors = zip(*(gpt_oss_tensors(layer) for layer in range(2)), strict=True)
    for name, tensor in changes.items():
        tensors[1].pop(PREFIX.format(1) + name)
        if tensor is not None:
            tensors[1][PREFIX.format(1) + name] = tensor.contiguous()
    if sharded:
        for i, part in enumerate(tensors):
            save_file(part, folder / f"part{i}.safetensors")
        weight_map = {name: f"part{i}.safetensors" for i, part in enumerate(tensors) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        save_file(tensors[0] | tensors[1], folder / "model.safetensors")
    return list(experts)


@pytest.mark.parametrize("sharded", [False, True])
def test_gpt_oss_experts_are_read_as_written(tmp_path: Path, sharded: bool) -> None:
    written = write(tmp_path, sharded=sharded)
    for layer, wanted in enumerate(written):
        found = read_gpt_oss_experts(tmp_path, layer)
        pairs = zip(found.tensors().values(), wanted.tensors().values(), strict=True)
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
    again = unprepare(prepare(found, activation=GPT_OSS, interleaved=True), interleaved=True)
    assert torch.equal(again.w13, wanted.w13)
    assert torch.equal(again.w13_scale, wanted.w13_scale)


def test_gpt_oss_biases_may_be_absent(tmp_path: Path) -> None:
    write(tmp_path, sharded=False, gate_up_proj_bias=None, down_proj_bias=None)
    found = read_gpt_oss_experts(tmp_path, 1)
    assert found.w13_bias is None and found.w2_bias is None


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD_GPT_OSS: list[tuple[dict[str, Tensor | None], type[Exception], str]] = [
    ({"down_proj_scales": None}, ValueError, "must hold tensor {}down_proj_scales, found no file that has it."),
    (
        {"gate_up_proj_scales": torch.zeros(7, 320, 3)},
        TypeError,
        "{}gate_up_proj_scales must be uint8, got float32.",
    ),
    ({"down_proj_bias": zeros(7, 96)}, TypeError, "{}down_proj_bias must be a float dtype, got uint8."),
    (
        {"gate_up_proj_blocks": zeros(7, 320, 48)},
        ValueError,
        "{}gate_up_proj_blocks must be [E, 2I, H/32, 16], got [7, 320, 48].",
    ),
    (
        {"gate_up_proj_blocks": zeros(7, 160, 3, 16)},
        ValueError,
        "{}gate_up_proj_blocks must be [E, 2I, H/32, 16] = [7, 320, 3, 16], got [7, 160, 3, 16].",
    ),
    (
        {"down_proj_scales": zeros(7, 96, 10)},
        ValueError,
        "{}down_proj_scales must be [E, H, I/32] = [7, 96, 5], got [7, 96, 10].",
    ),
]


@pytest.mark.parametrize(("changes", "kind", "sentence"), BAD_GPT_OSS, ids=[s.format("") for *_, s in BAD_GPT_OSS])
@pytest.mark.parametrize("sharded", [False, True])
def test_wrong_gpt_oss_tensors_are_refused(
    tmp_path: Path, changes: dict[str, Tensor | None], kind: type[Exception], sentence: str, sharded: bool
) -> None:
    write(tmp_path, sharded=sharded, **changes)
    with pytest.raises(kind, match=re.escape(sentence.format(PREFIX.format(1)))) as error:
        read_gpt_oss_experts(tmp_path, 1)
    assert str(tmp_path) in str(error.value)


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"must hold model\.safetensors\.index\.json or model\.safetensors, found neither"
    ):
        read_gpt_oss_experts(tmp_path, 0)
    write(tmp_path, sharded=True)
    part = tmp_path / "part1.safetensors"
    data = part.read_bytes()
    part.write_bytes(data[: len(data) // 2])
    with pytest.raises(
        ValueError, match=r"part1\.safetensors must be a whole safetensors file, found \d+ bytes, but tensor"
    ):
        read_gpt_oss_experts(tmp_path, 1)
    part.unlink()
    with pytest.raises(FileNotFoundError, match=r"needs the file .*part1\.safetensors, found none"):
        read_gpt_oss_experts(tmp_path, 1)
    save_file({"other": torch.zeros(1)}, part)
    with pytest.raises(ValueError, match="as the index says, found"):
        read_gpt_oss_experts(tmp_path, 1)


def test_opening_a_checkpoint_says_which_file_has_what(tmp_path: Path) -> None:
    write(tmp_path, sharded=True)
    assert Checkpoint.open(tmp_path).files[PREFIX.format(1) + "down_proj_bias"] == "part1.safetensors"


def test_saving_over_the_file_that_is_mapped(tmp_path: Path) -> None:
    """Loaded tensors map the file: it is replaced, never cut short under them."""
    path = tmp_path / "experts.safetensors"
    packed = packed_by("reference")
    save_packed(packed, path)
    loaded = load_packed(path)
    save_packed(loaded, path)
    assert equal(loaded, packed) and equal(load_packed(path), packed)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
