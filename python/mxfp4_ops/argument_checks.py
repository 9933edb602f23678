"""The rules for one tensor argument that the checks of many ops share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import dtype_name, need, need_type

_FEW_IDS = 64


def need_dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    need_type(
        tensor.dtype in allowed,
        lambda: f"{op}: {name} must be {' or '.join(map(dtype_name, allowed))}, got {dtype_name(tensor.dtype)}.",
    )


def need_float(op: str, name: str, tensor: Tensor) -> None:
    need_type(
        tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1,
        lambda: f"{op}: {name} must be a float dtype, got {dtype_name(tensor.dtype)}.",
    )


def need_device(op: str, name: str, tensor: Tensor, like: Tensor, whose: str = "x's") -> None:
    need(
        tensor.device == like.device,
        lambda: f"{op}: {name} must be on {whose} device {like.device}, got {tensor.device}.",
    )


def need_shape(op: str, name: str, tensor: Tensor, wanted: Sequence[int], label: str, remedy: str = "") -> None:
    need(
        tensor.shape == tuple(wanted),
        lambda: f"{op}: {name} must be {label} = {list(wanted)}, got {list(tensor.shape)}.{remedy}",
    )


def need_dims(op: str, name: str, tensor: Tensor, dims: int, label: str) -> None:
    need(tensor.dim() == dims, lambda: f"{op}: {name} must be {label}, got {list(tensor.shape)}.")


def extremes(ids: Tensor) -> tuple[int, int]:
    """Least and greatest of some integers. Reads data."""
    if ids.numel() <= _FEW_IDS:  # a decode step: plain Python is quicker than a kernel and two reads of its result
        values = ids.flatten().tolist()
        return min(values), max(values)
    low, high = torch.aminmax(ids)
    return int(low), int(high)
