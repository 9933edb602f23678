"""How each library's quantizer is called, and where its own answer is not defined."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from mxfp4_ops.format import codes_of
from torch import Tensor

FOLDERS: dict[str, str] = {}  # command line option -> folder that holds the package
BOTH = (torch.float32, torch.bfloat16)
Answer = tuple[Tensor, Tensor]


def _nothing(x: Tensor) -> Tensor:
    return torch.zeros(len(x), dtype=torch.bool)


def _nan(x: Tensor) -> Tensor:
    return x.isnan().any(-1)


def _not_finite(x: Tensor) -> Tensor:
    return ~x.isfinite().all(-1)


def _not_finite_or_rounds_to_inf(x: Tensor) -> Tensor:
    return _not_finite(x) | (x.abs().amax(-1) >= 1.75 * 2.0**127)


def _inf_or_tiny(x: Tensor) -> Tensor:
    amax = x.abs().amax(-1)
    return x.isinf().any(-1) | ((amax > 0) & (amax < 2.0**-125))


@dataclass(frozen=True)
class Library:
    """One quantizer. ``run`` takes [n, 32] and returns one code a byte [n, 32] and scale bytes [n], or values [n, 32].

    left_out: blocks where the library's answer is undefined or known to be another, with the reason. kernel: a Triton
    kernel. golden: its answers go into the golden table.
    """

    mode: str
    package: str
    what: str
    run: Callable[[Tensor], Answer]
    dtypes: tuple[torch.dtype, ...] = BOTH
    left_out: Callable[[Tensor], Tensor] = _nothing
    why_left_out: str = ""
    values: bool = False
    kernel: bool = False
    golden: bool = False
    version: str = ""

    def title(self) -> str:
        try:
            version = self.version or metadata.version(self.package)
        except metadata.PackageNotFoundError:
            version = "not installed"
        return f"{self.package} {version} {self.what}"

    def interpreter_is_wrong(self, x: Tensor) -> Tensor:
        """Blocks with bfloat16 subnormals, which Triton 3.9's interpreter does not convert to float32 rightly."""
        subnormal = ((x != 0) & (x.float().abs() < 2.0**-126)).any(-1)
        return subnormal & (self.kernel and x.dtype is torch.bfloat16)

    def reason(self, dtype: torch.dtype) -> str:
        interpreter = self.kernel and dtype is torch.bfloat16
        subnormals = (
            ["left out: bfloat16 subnormals, which Triton's interpreter converts wrongly"] if interpreter else []
        )
        return "; ".join([self.why_left_out] * bool(self.why_left_out) + subnormals)

    def not_exact(self, x: Tensor) -> Tensor:
        """Blocks that this library cannot be asked about in its first dtype."""
        held = x.to(self.dtypes[0])
        return ~((held.float() == x) | x.isnan()).all(-1) | self.interpreter_is_wrong(held)


def _torchao(rule: str) -> Callable[[Tensor], Answer]:
    def run(x: Tensor) -> Answer:
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

        mode = getattr(ScaleCalculationMode, rule)
        scales, blocks = to_mx(x, torch.float4_e2m1fn_x2, 32, scaling_mode=mode)
        return codes_of(blocks.view(torch.uint8)), scales.view(torch.uint8)[:, 0]

    return run


def _package_in(option: str, name: str, module: str) -> Any:
    """Import ``module`` of package ``name`` from the folder of ``option``, forgetting another copy of the package."""
    for loaded in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[loaded]
    folder = [FOLDERS[option]] if option in FOLDERS else []
    sys.path[:0] = folder
    try:
        return importlib.import_module(module)
    finally:
        del sys.path[: len(folder)]


def _triton_kernels(option: str, rounding: str, *, kernel: bool) -> Callable[[Tensor], Answer]:
    def run(x: Tensor) -> Answer:
        at = "triton_kernels.numerics_details.mxfp"
        module = _package_in(option, "triton_kernels", at)
        if kernel:  # the interpreter cannot divide an int by a constexpr of the module
            importlib.import_module(at + "_details._downcast_to_mxfp").MXFP_BLOCK_SIZE = 32  # type: ignore[attr-defined]
        call = module.downcast_to_mxfp if kernel else module.downcast_to_mxfp_torch
        mode = getattr(module.DequantScaleRoundingMode, rounding)
        blocks, scales = call(x, torch.uint8, 1, DEQUANT_SCALE_ROUNDING_MODE=mode)
        return codes_of(blocks), scales[:, 0]

    return run


def _vllm(x: Tensor) -> Answer:
    module = _package_in("vllm", "vllm", "vllm.model_executor.layers.quantization.utils.mxfp4_utils")
    blocks, scales, _ = module.downcast_to_mxfp(x, 1)
    return codes_of(blocks), scales[:, 0]


def _quark_values(x: Tensor) -> Answer:
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx

    return fake_quantize_mx(x, -1, 32, "even", mx_element_dtype="fp4"), torch.zeros(len(x), dtype=torch.uint8)


def _quark_triton(*, kernel: bool) -> Callable[[Tensor], Answer]:
    def run(x: Tensor) -> Answer:
        from quark.torch.kernel.mx import triton

        call = triton.downcast_to_mxfp if kernel else triton.downcast_to_mxfp_torch
        even = triton.DequantScaleRoundingMode.EVEN
        blocks, scales = call(x, torch.uint8, 1, DEQUANT_SCALE_ROUNDING_MODE=even)[:2]
        return codes_of(blocks), scales[:, 0]

    return run


def _compressed_tensors(x: Tensor) -> Answer:
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    arguments = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    scale, _ = calculate_qparams(x.amin(1, keepdim=True), x.amax(1, keepdim=True), arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    packed = MXFP4PackedCompressor.compress({"weight": x, "weight_scale": scale}, scheme)
    return codes_of(packed["weight_packed"]), packed["weight_scale"][:, 0]


def _gguf(x: Tensor) -> Answer:
    from gguf.quants import MXFP4

    packed = torch.from_numpy(MXFP4.quantize_blocks(x.float().numpy()))
    halves = packed[:, 1:]  # element j in the low nibble, j + 16 in the high one
    return torch.cat((halves & 15, halves >> 4), 1), packed[:, 0]


def _modelopt(x: Tensor) -> Answer:
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor

    packed, scales = MXFP4QTensor.quantize(x, 32)
    return codes_of(packed._quantized_data.view(len(x), 16)), scales[:, 0]


def _aiter(x: Tensor) -> Answer:
    from aiter.ops.triton.quant import dynamic_mxfp4_quant

    blocks, scales = dynamic_mxfp4_quant(x)
    return codes_of(blocks), scales[:, 0]


def _flashinfer(x: Tensor) -> Answer:
    from flashinfer import mxfp4_quantize

    return mxfp4_quantize(x.cuda())


_HALF = (torch.bfloat16,)
_NAN_THERE = "NaN left out: the torch function lets it into the maximum, the kernel and the mode do not"
# The newer generation is triton-lang/triton at 018a674. It was run from its rounding and its divisor transcribed into
# the files of 3.5, which need less of the package.
_GENERATION = {"triton_kernels_3_5": "3.5 (vllm 0.33.0)", "triton_kernels": "018a674 (transcribed)"}
_TK = [
    (f"triton_kernels{generation}{suffix}", f"triton_kernels{generation}", rounding)
    for generation in ("", "_3_5")
    for suffix, rounding in (("", "ROUND_UP"), ("_down", "ROUND_DOWN"))
]
LIBRARIES = [
    *[
        Library(f"torchao_{rule.lower()}", "torchao", f"to_mx {rule}", _torchao(rule), golden=True)
        for rule in ("FLOOR", "CEIL", "EVEN", "RCEIL")
    ],
    Library("quark", "vllm", "downcast_to_mxfp kernel", _vllm, _HALF, kernel=True, golden=True,
            version="0.33.0"),
    Library("quark", "amd-quark", "fake_quantize_mx even", _quark_values, BOTH, _nan,
            "NaN left out: there it makes its whole block NaN, in the kernels not", values=True),
    Library("quark", "amd-aiter", "dynamic_mxfp4_quant", _aiter, _HALF),
    Library("quark_triton", "amd-quark", "triton EVEN kernel", _quark_triton(kernel=True), _HALF,
            kernel=True),
    Library("quark_triton", "amd-quark", "triton EVEN torch", _quark_triton(kernel=False), BOTH, _nan, _NAN_THERE,
            golden=True),
    Library("compressed_tensors", "compressed-tensors", "MXFP4PackedCompressor", _compressed_tensors, BOTH,
            _not_finite_or_rounds_to_inf, "undefined left out: NaN, Inf, amax >= 1.75 * 2^127", golden=True),
    *[
        Library(mode, "triton_kernels", f"{rounding} kernel", _triton_kernels(option, rounding, kernel=True), BOTH,
                kernel=True, golden=True, version=_GENERATION[option])
        for mode, option, rounding in _TK
    ],
    *[
        Library(mode, "triton_kernels", f"{rounding} torch", _triton_kernels(option, rounding, kernel=False), BOTH,
                _nan, _NAN_THERE, version=_GENERATION[option])
        for mode, option, rounding in _TK
    ],
    Library("flashinfer", "flashinfer-python", "mxfp4_quantize", _flashinfer, _HALF),
    Library("gguf", "gguf", "quants.MXFP4", _gguf, BOTH, _inf_or_tiny,
            "undefined left out: Inf, 0 < amax < 2^-125 (negative float to uint8)", golden=True),
    Library("modelopt", "nvidia-modelopt", "MXFP4QTensor", _modelopt, BOTH, _not_finite,
            "undefined left out: NaN, Inf (float to uint8)", golden=True),
]  # fmt: skip
