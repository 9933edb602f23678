"""Experts on disk: packed ones in a safetensors file that says their layout, and gpt-oss checkpoints layer by layer.

Every refusal is one sentence that names the file, the tensor, what was found and what was needed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from . import checks
from .activation import Activation, resolve
from .dispatch import backend_of
from .errors import dtype_name, need, need_type
from .experts import ExpertWeights
from .layout import BIASES, SLOTS
from .packages import need_package
from .packed import PackedExperts

_VERSION = "1"
_KEY = "mxfp4."  # prefix of our metadata keys, which stand beside other people's
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FEW = 8  # names in a sentence

# gpt-oss in the Hugging Face format: canonical bytes, blocks with a dimension of their own, gate and up rows in turn.
GPT_OSS_EXPERTS = "model.layers.{layer}.mlp.experts."
GPT_OSS_NAMES = {
    "w13": "gate_up_proj_blocks",
    "w13_scale": "gate_up_proj_scales",
    "w13_bias": "gate_up_proj_bias",
    "w2": "down_proj_blocks",
    "w2_scale": "down_proj_scales",
    "w2_bias": "down_proj_bias",
}


def save_packed(packed: PackedExperts, path: str | os.PathLike[str]) -> None:
    """Write packed experts to one safetensors file: the tensors as they are, layout tag and sizes as metadata.

    Tensors: w13, w13_scale, w13_bias, w2, w2_scale, w2_bias, aux0, ...; absent biases are not written.
    Metadata: mxfp4.version, .layout, .hidden, .intermediate, .activation, and .alpha, .beta, .limit where they are set.
    """
    need_package("mxfp4_ops.save_packed", "safetensors")
    from safetensors.torch import save_file

    tensors = {name: getattr(packed, name) for name in SLOTS} | {f"aux{i}": t for i, t in enumerate(packed.aux)}
    metadata = {"version": _VERSION, "layout": packed.layout, "activation": packed.activation}
    metadata |= {"hidden": str(packed.hidden), "intermediate": str(packed.intermediate)}
    metadata |= {n: repr(v) for n in ("alpha", "beta", "limit") if (v := getattr(packed, n)) is not None}
    # Under another name first: the tensors may map the very file that is written, and a crash leaves the old one whole.
    partial = Path(f"{os.fspath(path)}.partial")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None},
        partial,
        metadata={_KEY + name: value for name, value in metadata.items()},
    )
    partial.replace(path)


def load_packed(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> PackedExperts:
    """Read what ``save_packed`` wrote, bytes as they were; on a CPU the tensors map the file.

    Raises: FileNotFoundError for an absent file; ValueError for a file that is truncated, lacks metadata or tensors,
    or has an unknown tag or shapes that do not fit it; TypeError for dtypes that do not.
    """
    op = f"mxfp4_ops.load_packed: {path}"
    with _opened(op, Path(path), device) as file:
        metadata = {k.removeprefix(_KEY): v for k, v in (file.metadata() or {}).items() if k.startswith(_KEY)}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    tag = _metadata(op, metadata, "layout")
    need(
        _metadata(op, metadata, "version") == _VERSION,
        lambda: f"{op}: metadata {_KEY}version must be {_VERSION}, got {metadata['version']!r}.",
    )
    backend = backend_of(op, tag)
    sizes = {name: _number(op, metadata, name, int) for name in ("hidden", "intermediate")}
    options = {n: _number(op, metadata, n, float) if n in metadata else None for n in ("alpha", "beta", "limit")}
    act = Activation(_metadata(op, metadata, "activation"), **options)
    resolve(op, act.name, act.alpha, act.beta, act.limit)
    specs = checks.names(op, backend, **sizes, gated=act.gated)
    stored = [*SLOTS, *(f"aux{i}" for i in range(len(specs) - len(SLOTS)))]
    missing = [name for name in stored if name not in tensors and name not in BIASES]
    need(not missing, lambda: f"{op}: must hold tensor {missing[0]}, found {', '.join(sorted(tensors)) or 'none'}.")
    extra = sorted(set(tensors) - set(stored))
    need(not extra, lambda: f"{op}: must hold {', '.join(stored)} only, found also {', '.join(extra)}.")
    present = [tensors.get(name) for name in stored]
    checks.packed(op, dict(zip(specs, present, strict=True)), backend, **sizes, gated=act.gated)
    filled = [tensors["w13"].new_empty(tensors["w13"].shape[0], 0) if t is None else t for t in present]
    return PackedExperts.from_tensors(filled, tag, sizes["hidden"], sizes["intermediate"], act)


def _metadata(op: str, metadata: Mapping[str, str], name: str) -> str:
    need(
        name in metadata,
        lambda: (
            f"{op}: metadata must have {_KEY}{name}, found {sorted(_KEY + k for k in metadata) or 'none of ours'}. "
            "save_packed() writes it."
        ),
    )
    return metadata[name]


def _number(op: str, metadata: Mapping[str, str], name: str, kind: type[Any]) -> Any:
    text = _metadata(op, metadata, name)
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{op}: metadata {_KEY}{name} must be a number, got {text!r}.") from None


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors files in the Hugging Face format: which file holds which tensor."""

    folder: Path
    files: Mapping[str, str]  # tensor name -> file name

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> Checkpoint:
        """Read model.safetensors.index.json, or the header of model.safetensors where there is no index."""
        folder, op = Path(folder), "mxfp4_ops.checkpoint"
        index = folder / _INDEX
        if index.is_file():
            files: Any = json_object(op, index).get("weight_map")
            need(
                isinstance(files, dict), lambda: f"{op}: {index} must have a weight_map of names to files, found none."
            )
            for name, file in files.items():
                # A plain name: what an index says may not lead out of the folder. The file itself may be a link.
                plain = isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\\0")
                need(
                    plain,
                    lambda n=name, f=file: (  # type: ignore[misc]
                        f"{op}: {index} must name a file in its own folder for tensor {n}, got {f!r}."
                    ),
                )
            return Checkpoint(folder, files)
        if not (folder / _SINGLE).is_file():
            raise FileNotFoundError(f"{op}: {folder} must hold {_INDEX} or {_SINGLE}, found neither.")
        with _opened(op, folder / _SINGLE) as file:
            return Checkpoint(folder, dict.fromkeys(file.keys(), _SINGLE))

    def verify(self) -> None:
        """Read every file's header: each is whole, holds the tensors the index says, and none that the index has
        elsewhere. Raises FileNotFoundError or ValueError; takes milliseconds, since no tensor is read."""
        op = "mxfp4_ops.checkpoint"
        names: dict[str, set[str]] = {}
        for file_name in sorted(set(self.files.values())):
            with _opened(op, self.folder / file_name) as file:
                names[file_name] = set(file.keys())
        for file_name, held in names.items():
            path = self.folder / file_name
            missing = sorted(n for n, f in self.files.items() if f == file_name and n not in held)
            need(
                not missing,
                lambda p=path, m=missing, h=held: _must_hold(op, p, m[0], h),  # type: ignore[misc]
            )
            twice = sorted(n for n in held if self.files.get(n, file_name) != file_name)
            need(
                not twice,
                lambda p=path, t=twice: (  # type: ignore[misc]
                    f"{op}: {p} must not hold tensor {t[0]}, which the index has in {self.files[t[0]]}, found it in "
                    "both. Delete the file that is not part of the checkpoint."
                ),
            )

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, mapping the file. Raises ValueError where no file has it, or the file is not whole."""
        op = "mxfp4_ops.checkpoint"
        need(name in self.files, lambda: f"{op}: {self.folder} must hold tensor {name}, found no file that has it.")
        path = self.folder / self.files[name]
        with _opened(f"{op}: {name}", path) as file:
            held = set(file.keys())
            need(name in held, lambda: _must_hold(op, path, name, held))
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _must_hold(op: str, path: Path, name: str, held: Collection[str]) -> str:
    few = sorted(held)[:_FEW] + ["..."] * (len(held) > _FEW)
    return f"{op}: {path} must hold tensor {name}, as the index says, found {', '.join(few) or 'none'}."


def json_object(op: str, path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ValueError for other contents, FileNotFoundError for no file."""
    if not path.is_file():
        raise FileNotFoundError(f"{op}: needs the file {path}, found none.")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{op}: {path} must be JSON, got {error}. Copy the checkpoint again.") from None
    need(isinstance(found, dict), lambda: f"{op}: {path} must be a JSON object, got {type(found).__name__}.")
    return cast(dict[str, Any], found)


@contextmanager
def _opened(op: str, path: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    need_package("mxfp4_ops.checkpoint", "safetensors")
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{op}: needs the file {path}, found none.")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except SafetensorError as error:  # also from reading a tensor, of a dtype that torch does not have
        raise ValueError(f"{op}: {path} must be a whole safetensors file, {_damage(path) or error}.") from None


def _damage(path: Path) -> str:
    """Say which tensor a truncated file stops in; empty where the header itself is unreadable."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            return f"found {size} bytes, fewer than its header needs ({8 + length})"
        try:
            header = json.loads(file.read(length))
            ends = sorted((t["data_offsets"][1] + 8 + length, n) for n, t in header.items() if n != "__metadata__")
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            return ""
    return next((f"found {size} bytes, but tensor {name} ends at byte {end}" for end, name in ends if end > size), "")


def read_gpt_oss_experts(folder: str | os.PathLike[str] | Checkpoint, layer: int) -> ExpertWeights:
    """Read one layer's experts of a gpt-oss checkpoint in the Hugging Face format, canonical but for the order of rows.

    Shapes on disk: gate_up_proj_blocks [E, 2I, H/32, 16], _scales [E, 2I, H/32], _bias [E, 2I]; down_proj_blocks
    [E, H, I/32, 16], _scales [E, H, I/32], _bias [E, H]. Blocks come back as [E, 2I, H/2] and [E, H, I/2], without a
    copy. The rows of w13 are gate 0, up 0, gate 1, ...: ``prepare(..., interleaved=True)``. Both biases may be absent.
    Raises: FileNotFoundError, ValueError or TypeError, naming file, tensor, found and needed.
    Source: huggingface.co/openai/gpt-oss-20b; transformers 5.24, integrations/mxfp4.py.
    """
    checkpoint = folder if isinstance(folder, Checkpoint) else Checkpoint.open(folder)
    prefix = GPT_OSS_EXPERTS.format(layer=layer)
    names = {slot: prefix + name for slot, name in GPT_OSS_NAMES.items()}
    biases = [names[slot] for slot in BIASES if names[slot] in checkpoint.files]
    need(
        len(biases) != 1,
        lambda: (
            f"mxfp4_ops.checkpoint: {checkpoint.folder} must hold both {names['w13_bias']} and {names['w2_bias']}, or "
            f"neither, found {biases[0]} alone."
        ),
    )
    names = {slot: name for slot, name in names.items() if slot not in BIASES or biases}
    found = {slot: checkpoint.tensor(name) for slot, name in names.items()}
    where = {
        slot: f"mxfp4_ops.checkpoint: {checkpoint.folder / checkpoint.files[name]}: {name}"
        for slot, name in names.items()
    }
    for slot, tensor in found.items():
        _gpt_oss_dtype(where[slot], slot, tensor)
    for slot in ("w13", "w2"):
        shape = list(found[slot].shape)
        need(
            len(shape) == 4 and shape[3] == 16 and math.prod(shape) > 0,
            lambda s=slot, f=shape: f"{where[s]} must be {_GPT_OSS_SHAPES[s]}, got {f}.",  # type: ignore[misc]
        )
    experts, hidden, groups = *found["w2"].shape[:2], found["w2"].shape[2]
    need(hidden % 32 == 0, lambda: f"{where['w2']} must have H, a multiple of 32, as dimension 1, got {hidden}.")
    wanted = _gpt_oss_shapes(experts, hidden, groups * 32)
    for slot, tensor in found.items():
        need(
            list(tensor.shape) == wanted[slot],
            lambda s=slot, t=tensor: (
                f"{where[s]} must be {_GPT_OSS_SHAPES[s]} = {wanted[s]}, got {list(t.shape)}. "  # type: ignore[misc]
                f"E, H and I are those of {names['w2']}.{_nvfp4(s, wanted[s], list(t.shape))}"
            ),
        )
    slots = {slot: found[slot].flatten(2) if slot in ("w13", "w2") else found.get(slot) for slot in SLOTS}
    return ExpertWeights(**slots)  # type: ignore[arg-type]


def _nvfp4(slot: str, wanted: list[int], shape: list[int]) -> str:
    doubled = slot.endswith("scale") and shape == [*wanted[:-1], 2 * wanted[-1]]
    return checks.NVFP4_HINT if doubled else ""


_GPT_OSS_SHAPES = {
    "w13": "[E, 2I, H/32, 16]",
    "w13_scale": "[E, 2I, H/32]",
    "w13_bias": "[E, 2I]",
    "w2": "[E, H, I/32, 16]",
    "w2_scale": "[E, H, I/32]",
    "w2_bias": "[E, H]",
}


def _gpt_oss_shapes(experts: int, hidden: int, intermediate: int) -> dict[str, list[int]]:
    return {
        "w13": [experts, 2 * intermediate, hidden // 32, 16],
        "w13_scale": [experts, 2 * intermediate, hidden // 32],
        "w13_bias": [experts, 2 * intermediate],
        "w2": [experts, hidden, intermediate // 32, 16],
        "w2_scale": [experts, hidden, intermediate // 32],
        "w2_bias": [experts, hidden],
    }


def _gpt_oss_dtype(where: str, slot: str, tensor: Tensor) -> None:
    if slot in BIASES:
        ok, wanted = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1, "a float dtype"
    else:
        ok, wanted = tensor.dtype is torch.uint8, "uint8"
    need_type(ok, lambda: f"{where} must be {wanted}, got {dtype_name(tensor.dtype)}.")
