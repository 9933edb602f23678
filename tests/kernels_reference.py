"""Packing and float64 mathematics for test_isa.py, in numpy and independent of the package.

Codes are uint8 0..15, one per element; scale bytes are uint8, one per 32 elements along k.
"""

import ctypes
import mmap
from math import erf

import numpy as np

F32, BF16, F16, F64 = range(4)  # dtype codes of the kernels
EXTREME_SCALES = [0, 1, 2, 249, 250, 251, 252, 253, 254, 255]

ELEMENTS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
NIBBLE_TO_K = [0, 2, 4, 6, 1, 3, 5, 7]
ACTIVATIONS = ["silu", "swigluoai", "swiglustep", "situ", "gelu", "gelu_tanh"]
ACTIVATIONS += ["relu2_no_mul", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul"]
GATED = 6  # the first six activations are


def guarded(array: np.ndarray) -> np.ndarray:
    """Copy an array to memory that ends at an inaccessible page."""
    size = -(-max(array.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    view = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(view.ctypes.data + size, mmap.PAGESIZE, 0) == 0
    copy = view[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def dequant(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Weights as fp32: [..., k] codes, [..., k/32] scale bytes."""
    with np.errstate(over="ignore"):
        factor = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(np.int32) - 127))
        return (ELEMENTS[codes].astype(np.float64) * np.repeat(factor, 32, axis=-1)).astype(np.float32)


def pack_tiles(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Pack rows [..., 32 n, k] into tiles [..., n, k/64, 1088]; k is a multiple of 64."""
    *lead, rows, k = codes.shape
    tiles, supers = rows // 32, k // 64
    n = codes.reshape(*lead, tiles, 2, 16, supers, 8, 8)[..., NIBBLE_TO_K]  # tile, half, lane, super, step, nibble
    data = n[..., 0::2] | n[..., 1::2] << 4  # 4 bytes a dword
    data = np.moveaxis(data, (-3, -2), (-5, -4))  # tile, super, step, half, lane, byte
    data = data.reshape(*lead, tiles, supers, 1024)
    s = scales.reshape(*lead, tiles, 32, supers, 2)
    s = np.moveaxis(s, (-2, -1), (-3, -2)).reshape(*lead, tiles, supers, 64)
    return np.ascontiguousarray(np.concatenate([s, data], axis=-1).astype(np.uint8))


def pad64(n: int) -> int:
    return -(-n // 64) * 64


def pad(array: np.ndarray, axis: int, size: int, value: int) -> np.ndarray:
    width = [(0, 0)] * array.ndim
    width[axis] = (0, size - array.shape[axis])
    return np.pad(array, width, constant_values=value)


def pack_matrix(codes: np.ndarray, scales: np.ndarray, halves: int) -> np.ndarray:
    """Pack [experts, halves * rows, k]; two halves are interleaved 16 rows by 16."""
    experts, rows, k = codes.shape
    kp, rp = pad64(k), pad64(rows // halves)
    packed = []
    for array, width, value in ((codes, kp, 0), (scales, kp // 32, 127)):
        a = array.reshape(experts, halves, rows // halves, -1)
        a = pad(pad(a, 3, width, value), 2, rp, value)
        if halves == 2:
            a = np.moveaxis(a.reshape(experts, 2, rp // 16, 16, width), 1, 2)
        packed.append(a.reshape(experts, halves * rp, width))
    return pack_tiles(*packed)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """Round fp32 to nearest even bf16."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16).astype(np.uint16) | 0x40, rounded).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2.0)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def activation(name: str, values: np.ndarray, alpha: float, beta: float, limit: float) -> np.ndarray:
    """The activation in float64; gated ones get [..., 2, n] (gate, up)."""
    v = values.astype(np.float64)
    unary = {"silu": lambda x: x * sigmoid(x), "gelu": gelu, "gelu_tanh": gelu_tanh}
    unary["relu2"] = lambda x: np.maximum(x, 0) ** 2
    if name.endswith("_no_mul"):
        return unary[name.removesuffix("_no_mul")](v)
    g, u = v[..., 0, :], v[..., 1, :]
    low, bounded = np.minimum(g, limit), np.clip(u, -limit, limit)
    if name == "silu":
        return low * sigmoid(low) * bounded
    if name == "swigluoai":
        return low * sigmoid(alpha * low) * (bounded + beta)
    if name == "swiglustep":
        return np.minimum(g * sigmoid(g), limit) * bounded
    if name == "situ":
        return alpha * np.tanh(g / alpha) * sigmoid(g) * (beta * np.tanh(u / beta) if np.isfinite(beta) else u)
    return unary[name](g) * u


def moe(x, ids, weights, w13, b13, w2, b2, name, alpha, beta, limit, weight_on_input, round_hidden):
    """The layer in float64 on dequantized weights [E, rows, k]; h is rounded to bf16 when asked."""
    out = np.zeros((x.shape[0], w2.shape[1]))
    for t, j in np.argwhere(ids >= 0):
        e, w = ids[t, j], float(weights[t, j])
        v = w13[e].astype(np.float64) @ x[t].astype(np.float64)
        v = v * (w if weight_on_input else 1.0) + (0 if b13 is None else b13[e])
        h = activation(name, v if name.endswith("_no_mul") else v.reshape(2, -1), alpha, beta, limit)
        if round_hidden:
            h = bf16_values(bf16_bits(h)).astype(np.float64)
        y = w2[e].astype(np.float64) @ h + (0 if b2 is None else b2[e])
        out[t] += (1.0 if weight_on_input else w) * y
    return out
