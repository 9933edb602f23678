"""Damaged and hostile files: each ends in one sentence of ours that names the file, before anything is packed."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mxfp4_ops import ExpertWeights, MXFP4Experts, prepare
from mxfp4_ops.checkpoint import Checkpoint, load_packed, read_gpt_oss_experts, save_packed
from mxfp4_ops.demo.checkpoint_writer import SMALL, write_checkpoint
from mxfp4_ops.integrations.transformers import load_gpt_oss
from mxfp4_ops.packages import MissingPackage
from problems import TINY, weights
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES = replace(SMALL, experts=4)
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]  # layer 0, layer 1, what is no expert's layer
INDEX = "model.safetensors.index.json"
EXPERTS = "model.layers.1.mlp.experts."
OURS = (ValueError, TypeError, FileNotFoundError)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_checkpoint(folder, SIZES)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint of two layers, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "gpt-oss"))


def refused(call: Callable[[], object], *words: str) -> None:
    """The call ends in a sentence of ours, with these words; neither in a bare Python error nor in silence."""
    with pytest.raises(OURS) as caught:
        call()
    text = str(caught.value)
    assert type(caught.value) in OURS, f"{type(caught.value).__name__} is no plain error: {text}"
    assert text.startswith(("mxfp4_ops", "MXFP4Experts: the state")) and text.endswith((".", "?")), text
    assert len(text) < 2000, len(text)
    for word in words:
        assert word in text, text


def began(layers: Iterable[int]) -> Iterable[int]:
    raise AssertionError("packing began")


def load(folder: Path) -> object:
    return load_gpt_oss(folder, progress=began)


def test_the_checkpoint_is_good_before_it_is_damaged(folder: Path) -> None:
    with pytest.raises(AssertionError, match="packing began"):
        load(folder)


# ------------------------------------------------------------------------------------------ bytes of a safetensors file


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED = {
    "empty": b"",
    "three bytes": b"abc",
    "header beyond the file": struct.pack("<Q", 1000) + b"{}",
    "header length 2^64-1": b"\xff" * 8 + b"{}",
    "header not json": raw(b"{nope"),
    "header not utf-8": raw(b"\xff\xfe{}"),
    "header a list": raw([]),
    "header a list of numbers": raw([1]),
    "header a string": raw("x"),
    "header nested deeply": raw(b'{"a":' + b"[" * 50000),
    "entry a number": raw({"a": 1}),
    "entry without offsets": raw({"a": {"dtype": "U8", "shape": [1]}}, b"0"),
    "offsets no numbers": raw({"a": entry(offsets=["x", "y"])}, b"0000"),
    "offsets too few": raw({"a": entry(offsets=[0])}, b"0000"),
    "offsets beyond the file": raw({"a": entry(shape=[100], offsets=[0, 100])}, b"0" * 10),
    "offsets overlap": raw({"a": entry(), "b": entry(offsets=[2, 6])}, b"0" * 6),
    "offsets backwards": raw({"a": entry(offsets=[4, 0])}, b"0000"),
    "offsets against the shape": raw({"a": entry(offsets=[0, 3])}, b"000"),
    "shape negative": raw({"a": entry(shape=[-4])}, b"0000"),
    "shape overflows": raw({"a": entry(shape=[2**62, 2**62])}, b"0000"),
    "dtype unknown": raw({"a": entry("Q9")}, b"0000"),
    "dtype that torch lacks": raw({"a": entry("F6_E2M3", offsets=[0, 3])}, b"000"),
    "bytes behind the last tensor": raw({"a": entry()}, b"0" * 40),
    "a pickle": b"PK\x03\x04" + bytes(200),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_damaged_safetensors(folder: Path, data: bytes) -> None:
    alone = folder.parent / "model.safetensors"
    alone.write_bytes(data)
    refused(lambda: load_packed(alone), str(alone), "must be a whole safetensors file")
    refused(lambda: Checkpoint.open(alone.parent).tensor("a"), str(alone), "must be a whole safetensors file")
    (folder / SHARDS[2]).write_bytes(data)
    refused(lambda: load(folder), SHARDS[2])


def test_a_truncated_shard_is_found_before_the_first_layer_is_packed(folder: Path) -> None:
    path = folder / SHARDS[2]
    path.write_bytes(path.read_bytes()[:-1])
    refused(lambda: load(folder), str(path), "but tensor", "ends at byte")


# ---------------------------------------------------------------------------------------------------- index and shards


INDEXES: dict[str, tuple[bytes, str]] = {
    "not json": (b"nope", "must be JSON"),
    "empty": (b"", "must be JSON"),
    "not utf-8": (b"\xff\xfe\xff", "must be JSON"),
    "nested deeply": (b"[" * 100000, "must be JSON"),
    "a list": (b"[]", "must be a JSON object, got list"),
    "a number": (b"1", "must be a JSON object, got int"),
    "without a map": (b"{}", "must have a weight_map"),
    "map null": (b'{"weight_map": null}', "must have a weight_map"),
    "map a list": (b'{"weight_map": ["a"]}', "must have a weight_map"),
    "map empty": (b'{"weight_map": {}}', "must hold tensor"),
}
NAMES = [
    "../x.safetensors",
    "/etc/passwd",
    "sub/x.safetensors",
    "..\\x.safetensors",
    "..",
    ".",
    "",
    "a\0b",
    1,
    None,
    [],
]


@pytest.mark.parametrize(("data", "words"), INDEXES.values(), ids=INDEXES)
def test_damaged_index(folder: Path, data: bytes, words: str) -> None:
    (folder / INDEX).write_bytes(data)
    refused(lambda: read_gpt_oss_experts(folder, 0), str(folder), words)
    refused(lambda: load(folder), str(folder), words)


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_an_index_leads_nowhere_else(folder: Path, name: object) -> None:
    save_file({"a": torch.zeros(1)}, folder.parent / "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    refused(lambda: Checkpoint.open(folder), str(folder / INDEX), "its own folder for tensor a", repr(name))


def test_shards_that_are_links_are_read(folder: Path) -> None:
    """As the cache of Hugging Face has them."""
    moved = folder.parent / "blob"
    (folder / SHARDS[1]).rename(moved)
    (folder / SHARDS[1]).symlink_to(moved)
    read_gpt_oss_experts(folder, 1)
    moved.unlink()
    refused(lambda: read_gpt_oss_experts(folder, 1), SHARDS[1], "found none")


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def edit(folder: Path, shard: int, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {n: t.clone() for n, t in load_file(folder / SHARDS[shard]).items()}
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / SHARDS[shard])


def test_shards_that_contradict_the_index(folder: Path) -> None:
    name = EXPERTS + "down_proj_blocks"
    edit(folder, 0, lambda t: t.update({name: torch.zeros(1)}))
    refused(lambda: load(folder), SHARDS[0], name, "in both", SHARDS[1])
    edit(folder, 0, lambda t: t.pop(name))
    edit_json(folder / INDEX, lambda i: i["weight_map"].update({name: SHARDS[0]}))
    refused(lambda: load(folder), SHARDS[0], f"must hold tensor {name}, as the index says")
    edit_json(folder / INDEX, lambda i: i["weight_map"].update({name: "other.safetensors"}))
    refused(lambda: load(folder), "needs the file", "other.safetensors, found none")
    (folder / SHARDS[1]).unlink()
    refused(lambda: load(folder), "needs the file", SHARDS[1])


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        refused(lambda p=place: Checkpoint.open(p), str(place), "found neither")  # type: ignore[misc]
        refused(lambda p=place: load(p), str(place / "config.json"), "found none")  # type: ignore[misc]
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")  # a pickle could run code, so none is ever read
    refused(lambda: read_gpt_oss_experts(tmp_path, 0), "found neither")
    refused(lambda: load_packed(tmp_path), str(tmp_path), "found none")


# --------------------------------------------------------------------------------------------- tensors of a checkpoint


def cast(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], object]:
    return lambda t: t.update({EXPERTS + name: t[EXPERTS + name].to(dtype)})


def apply(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda t: t.update({EXPERTS + name: change(t[EXPERTS + name])})


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], tuple[str, ...]]] = {
    "blocks bfloat16": (cast("down_proj_blocks", torch.bfloat16), ("must be uint8, got bfloat16",)),
    "blocks int8": (cast("gate_up_proj_blocks", torch.int8), ("must be uint8, got int8",)),
    "scales float32": (cast("down_proj_scales", torch.float32), ("must be uint8, got float32",)),
    "scales e8m0": (cast("down_proj_scales", torch.float8_e8m0fnu), ("must be uint8, got float8_e8m0fnu",)),
    "bias int32": (cast("down_proj_bias", torch.int32), ("must be a float dtype, got int32",)),
    "scales of 16": (apply("down_proj_scales", lambda t: t.repeat(1, 1, 2)), ("[4, 96, 5], got [4, 96, 10]", "NVFP4")),
    "transposed": (apply("down_proj_scales", lambda t: t.transpose(1, 2)), ("[4, 96, 5], got [4, 5, 96]",)),
    "flat blocks": (apply("down_proj_blocks", lambda t: t.flatten(2)), ("[E, H, I/32, 16], got [4, 96, 80]",)),
    "no experts": (apply("down_proj_blocks", lambda t: t[:0]), ("[E, H, I/32, 16], got [0, 96, 5, 16]",)),
    "scalar": (apply("gate_up_proj_blocks", lambda t: t.flatten()[0]), ("[E, 2I, H/32, 16], got []",)),
    "an expert less": (apply("gate_up_proj_bias", lambda t: t[1:]), ("= [4, 320], got [3, 320]",)),
    "rows no multiple of 32": (apply("down_proj_blocks", lambda t: t[:, :90]), ("a multiple of 32", "got 90")),
}


@pytest.mark.parametrize(("change", "words"), TENSORS.values(), ids=TENSORS)
def test_wrong_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object], words: tuple[str, ...]) -> None:
    edit(folder, 1, change)
    refused(lambda: read_gpt_oss_experts(folder, 1), str(folder / SHARDS[1]), EXPERTS, *words)
    refused(lambda: load(folder), str(folder / SHARDS[1]), EXPERTS, *words)


@pytest.mark.parametrize("name", ["gate_up_proj_blocks", "down_proj_scales", "down_proj_bias"])
def test_a_missing_tensor(folder: Path, name: str) -> None:
    edit(folder, 1, lambda t: t.pop(EXPERTS + name))
    edit_json(folder / INDEX, lambda i: i["weight_map"].pop(EXPERTS + name))
    refused(lambda: read_gpt_oss_experts(folder, 1), str(folder), "must hold", EXPERTS + name)
    refused(lambda: load(folder), str(folder), EXPERTS + name)


def test_missing_layers_biases_and_other_weights(folder: Path) -> None:
    refused(lambda: read_gpt_oss_experts(folder, 2), "model.layers.2.mlp.experts.", "found no file that has it")
    edit(folder, 2, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}))
    refused(lambda: load(folder), SHARDS[2], "model.norm.weight must be bfloat16, float16 or float32, got int8")
    edit_json(folder / INDEX, lambda i: i["weight_map"].pop("model.norm.weight"))
    refused(lambda: load(folder), "must hold tensor model.norm.weight")
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        edit_json(folder / INDEX, lambda i, n=name: i["weight_map"].pop(EXPERTS + n))  # type: ignore[misc]
    refused(lambda: load(folder), "layer 1", "must have the biases of experts, found none")


# --------------------------------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize("data", [b"nope", b"", b"[]", b"\xff", b"null"])
def test_a_config_that_is_no_json_object(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    refused(lambda: load(folder), str(folder / "config.json"), "JSON")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_type": "llama"}, "must have model_type 'gpt_oss', got 'llama'"),
    "another format": ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'mxfp4' in"),
    "no format": ({"quantization_config": None}, "quant_method 'mxfp4' in quantization_config, got None"),
    "experts negative": ({"num_local_experts": -1}, "as num_local_experts, got -1"),
    "experts huge": ({"num_local_experts": 10**30}, "as num_local_experts, got 1000"),
    "experts text": ({"num_local_experts": "4"}, "as num_local_experts, got '4'"),
    "layers zero": ({"num_hidden_layers": 0}, "as num_hidden_layers, got 0"),
    "hidden true": ({"hidden_size": True}, "as hidden_size, got True"),
    "experts against tensors": ({"num_local_experts": 8}, "have experts = 4, but config.json says num_local"),
    "hidden against tensors": ({"hidden_size": 128}, "have hidden = 96, but config.json says hidden_size = 128"),
    "layers against tensors": ({"num_hidden_layers": 3, "layer_types": None}, "must hold tensor model.layers.2."),
    "layers against layer_types": ({"num_hidden_layers": 3}, "must describe a gpt-oss model"),
    "vocabulary huge": ({"vocab_size": 2**62}, "config.json"),
    "vocabulary against tensors": ({"vocab_size": 512}, "must be [512, 96], as config.json says, got [256, 96]"),
    "heads zero": ({"num_attention_heads": 0, "num_key_value_heads": 0}, "config.json"),
    "limit text": ({"swiglu_limit": "much"}, "config.json"),
    "limit negative": ({"swiglu_limit": -7.0}, "limit must be a positive number"),
    "limit null": ({"swiglu_limit": None}, "config.json"),
    "rope unknown": ({"rope_scaling": {"rope_type": "nope"}}, "config.json"),
}


@pytest.mark.parametrize(("change", "words"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_does_not_fit(folder: Path, change: dict[str, Any], words: str) -> None:
    edit_json(folder / "config.json", lambda c: c.update(change))
    refused(lambda: load(folder), words)


def test_an_old_transformers_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.56.0")
    with pytest.raises(MissingPackage, match=r"needs transformers >= 5\.19, 4\.56\.0 is installed\. pip install"):
        load(folder)


# ------------------------------------------------------------------------------- packed experts and the module's state


def test_sizes_that_are_no_blocks(tmp_path: Path) -> None:
    """Tensors that fit sizes of 16 elements more: half a block would be dropped in silence."""
    path = tmp_path / "x.safetensors"
    save_packed(prepare(weights(TINY), prefer="reference"), path)
    held = load_file(path)
    for hidden in (112, 97, -96, 0, 10**40):
        meta = {
            "version": "1",
            "layout": "canonical",
            "hidden": str(hidden),
            "intermediate": "160",
            "activation": "silu",
        }
        save_file(held, path, metadata={f"mxfp4.{k}": v for k, v in meta.items()})
        refused(lambda: load_packed(path), str(path), str(hidden) if hidden % 32 or hidden <= 0 else "w13 must be")


def as_state(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


STATES: dict[str, tuple[str, object, str]] = {
    "absent": ("_extra_state", None, "must have experts._extra_state"),
    "not json": ("_extra_state", as_state(b"nope"), "must be a JSON object"),
    "not utf-8": ("_extra_state", as_state(b"\xff\xfe\xfd"), "must be a JSON object"),
    "nested": ("_extra_state", as_state(b"[" * 4000), "must be a JSON object"),
    "a list": ("_extra_state", as_state(b"[]"), "must be a JSON object"),
    "huge": ("_extra_state", torch.zeros(10**8, dtype=torch.uint8), "in at most 4096 bytes of uint8"),
    "floats": ("_extra_state", torch.zeros(10), "bytes of uint8, got torch.float32 of [10]"),
    "a dict": ("_extra_state", {"layout": "canonical"}, "bytes of uint8, got dict"),
    "another layout": ("_extra_state", as_state(b'{"layout": "x.v1"}'), "layout must be 'canonical', got 'x.v1'"),
    "other sizes": ("_extra_state", as_state(b'{"layout": "canonical", "hidden": 64}'), "the state must describe"),
    "scales e8m0": ("w13_scale", torch.float8_e8m0fnu, "w13_scale must be uint8, got float8_e8m0fnu"),
    "codes float32": ("w2", torch.float32, "w2 must be uint8, got float32"),
    "bias int64": ("w2_bias", torch.int64, "w2_bias must be a float dtype, got int64"),
    "a shape": ("w2_scale", torch.zeros(7, 96, 4, dtype=torch.uint8), "w2_scale must be [7, 96, 5], got [7, 96, 4]"),
    "a tensor less": ("w2_bias", None, "the state must have w13, w13_scale, w13_bias, w2, w2_scale, w2_bias of"),
    "no tensor": ("w2", [1, 2], "w2 must be a tensor, got list"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("name", "value", "words"), STATES.values(), ids=STATES)
def test_states_that_do_not_fit(name: str, value: object, words: str, strict: bool) -> None:
    model = torch.nn.ModuleDict({"experts": MXFP4Experts(prepare(weights(TINY), prefer="reference"))})
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = {n: t + 1 if t.is_floating_point() else t ^ 1 if "extra" not in n else t for n, t in before.items()}
    key = f"experts.{name}"
    if value is None:
        del state[key]
    else:
        state[key] = state[key].to(value) if isinstance(value, torch.dtype) else value  # type: ignore[assignment]
    refused(lambda: model.load_state_dict(state, strict=strict), words)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()), "a buffer was overwritten"


@pytest.mark.parametrize("name", ["w13", "w13_scale", "w2", "w2_scale"])
@pytest.mark.parametrize("value", [None, [1], 3])
def test_experts_that_are_no_tensors(name: str, value: object) -> None:
    experts = ExpertWeights(**{**weights(TINY).tensors(), name: value})  # type: ignore[arg-type]
    got = "None" if value is None else type(value).__name__
    refused(lambda: prepare(experts), f"{name} must be a tensor, got {got}")
    biased = ExpertWeights(**{**weights(TINY).tensors(), "w2_bias": [1.0]})  # type: ignore[arg-type]
    refused(lambda: prepare(biased), "w2_bias must be a tensor, got list")
