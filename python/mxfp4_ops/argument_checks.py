"""The rules for one argument that the checks of many ops share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import dtype_name, need, need_type

_CODE_DTYPES = (torch.uint8, torch.float4_e2m1fn_x2)
_SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
_FEW = 64


def need_tensor(op: str, name: str, tensor: object) -> None:
    """torch lets None through where a schema says Tensor."""
    got = "None" if tensor is None else type(tensor).__name__
    need_type(isinstance(tensor, Tensor), lambda: f"{op}: {name} must be a tensor, got {got}.")


def need_dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    need_tensor(op, name, tensor)
    need_type(
        tensor.dtype in allowed,
        lambda: f"{op}: {name} must be {' or '.join(map(dtype_name, allowed))}, got {dtype_name(tensor.dtype)}.",
    )


def need_float(op: str, name: str, tensor: Tensor) -> None:
    need_tensor(op, name, tensor)
    need_type(
        tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1,
        lambda: f"{op}: {name} must be a float dtype, got {dtype_name(tensor.dtype)}.",
    )


def need_bytes(op: str, name: str, tensor: Tensor) -> None:
    """Codes, or scales where the name says so, as uint8 or as a view of the same bytes."""
    need_dtype(op, name, tensor, _SCALE_DTYPES if name.endswith("scale") or name == "scales" else _CODE_DTYPES)


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


def need_contiguous(op: str, name: str, tensor: Tensor, remedy: str) -> None:
    need(
        tensor.is_contiguous(),
        lambda: f"{op}: {name} must be contiguous, got strides {list(tensor.stride())}. {remedy}",
    )


def need_float32(op: str, name: str, number: float) -> None:
    """Refuse a number that float32 turns into another kind: Inf, NaN, or one beyond its normal numbers; 0 passes."""
    limits = torch.finfo(torch.float32)
    need(
        number == 0 or limits.tiny <= abs(number) <= limits.max,
        lambda: f"{op}: {name} must be a normal number of float32, which kernels compute in, got {number}.",
    )


def need_dims(op: str, name: str, tensor: Tensor, dims: int, label: str) -> None:
    need(tensor.dim() == dims, lambda: f"{op}: {name} must be {label}, got {list(tensor.shape)}.")


def cpu_extremes(values: Tensor) -> tuple[int, int]:
    """The least and the greatest of integers on a CPU; (0, -1) where there are none, and on other devices, whose data
    is not read."""
    if values.device.type != "cpu" or values.numel() == 0:
        return 0, -1
    if values.numel() <= _FEW:  # a decode step: plain Python is quicker than a kernel and two reads of its result
        plain = values.flatten().tolist()
        return min(plain), max(plain)
    low, high = torch.aminmax(values)
    return int(low), int(high)
