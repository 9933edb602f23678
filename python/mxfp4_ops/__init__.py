"""MXFP4 mixture-of-experts layers as torch ops: weights stay four bits wide, on any device.

``prepare`` packs checkpoint weights for the backend that ``select`` chose; calling the result, or
``torch.ops.mxfp4.moe``, runs it. Importing needs torch alone.
"""

from . import _ops as _ops  # defines the ops
from . import autograd as autograd
from .activation import ACTIVATIONS, Activation
from .backends import BACKENDS, Backend, Tolerance
from .debug import debug
from .dispatch import explain, select
from .errors import Unsupported
from .experts import ExpertWeights
from .functional import dequant_mxfp4, finalize, localise, mxfp4_moe, qdq_mxfp4, quant_mxfp4, quant_x, route
from .layout import Layout, TensorSpec
from .nn import MXFP4Experts
from .packed import PackedExperts
from .packed_topk import pack_topk, unpack_topk
from .prepare import prepare, problem_of, repack_expert, unprepare
from .problem import MoEProblem, arch_of
from .quant_modes import QUANT_MODES, QuantMode
from .quantize import quantize_experts
from .x_formats import X_FORMATS

__version__ = "0.1.0"

__all__ = [
    "ACTIVATIONS",
    "BACKENDS",
    "QUANT_MODES",
    "X_FORMATS",
    "Activation",
    "Backend",
    "ExpertWeights",
    "Layout",
    "MXFP4Experts",
    "MoEProblem",
    "PackedExperts",
    "QuantMode",
    "TensorSpec",
    "Tolerance",
    "Unsupported",
    "arch_of",
    "debug",
    "dequant_mxfp4",
    "explain",
    "finalize",
    "localise",
    "mxfp4_moe",
    "pack_topk",
    "prepare",
    "problem_of",
    "qdq_mxfp4",
    "quant_mxfp4",
    "quant_x",
    "quantize_experts",
    "repack_expert",
    "route",
    "select",
    "unpack_topk",
    "unprepare",
]
