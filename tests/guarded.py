"""Tensors that end at an inaccessible page, and tensors larger than memory of which only touched pages exist.

Run as a program, it calls every op on guarded tensors: an access past the end of a buffer ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

MAP_NORESERVE = 0x4000  # Linux


def guarded(tensor: Tensor) -> Tensor:
    """Copy a tensor to memory whose last byte is followed by a page that may not be read or written."""
    tensor = tensor.contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return tensor
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(whole.data_ptr() + size, mmap.PAGESIZE, 0) == 0
    copy = whole[size - nbytes : size].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def sparse(*shape: int) -> Tensor:
    """Zero bytes of any size: pages come into being when they are written."""
    count = torch.Size(shape).numel()
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)


def format_ops() -> None:
    for blocks in (1, 2, 3, 7, 129):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = guarded(torch.randn(blocks * 32).to(dtype))
            codes, scales = map(guarded, torch.ops.mxfp4.quant(x))
            torch.ops.mxfp4.qdq(x)
            out = guarded(torch.zeros(blocks * 32, dtype=dtype))
            torch.ops.mxfp4.dequant.out(codes, scales, out=out)
            assert torch.equal(out, torch.ops.mxfp4.dequant(codes, scales, dtype=dtype))


def layers(backends: Sequence[str]) -> None:
    from mxfp4_ops import PackedExperts, prepare, repack_expert, unprepare
    from problems import TINY, inputs, weights

    for problem in (
        TINY,
        TINY.with_(hidden=32, intermediate=32, experts=1),
        TINY.with_(tokens=40, hidden=128, experts=2),
    ):
        experts = type(weights(problem))(*map(guarded, weights(problem).tensors().values()))
        for name in backends:
            packed = prepare(experts, prefer=name)
            sizes = (packed.layout, packed.hidden, packed.intermediate, experts_activation(packed))
            held = PackedExperts.from_tensors(map(guarded, packed.tensors()), *sizes)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for tokens, options in ((1, {}), (2, {"batch_invariant": True}), (problem.tokens, {})):
                    args = [guarded(t[:tokens]) for t in inputs(problem, dtype)]
                    assert torch.equal(held(*args, **options), packed(*args, **options))
            unprepare(held)
            repack_expert(held, 0, type(experts)(*(guarded(t[0]) for t in experts.tensors().values())))


def experts_activation(packed: object) -> object:
    from mxfp4_ops import Activation

    return Activation(packed.activation, packed.alpha, packed.beta, packed.limit)


if __name__ == "__main__":
    import mxfp4_ops

    format_ops()
    torch.set_num_threads(1)
    isa = mxfp4_ops.arch_of("cpu")
    layers(["native_cpu"] if isa == "cpu_scalar" else [b.name for b in mxfp4_ops.BACKENDS])
    print("nothing was read past an end on", isa)
