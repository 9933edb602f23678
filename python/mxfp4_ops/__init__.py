"""MXFP4 mixture-of-experts layers as torch ops: weights stay four bits wide, on any device.

``prepare`` packs checkpoint weights for the backend that ``select`` chose; calling the result, or
``torch.ops.mxfp4.moe``, runs it. Importing needs torch alone.
"""

from . import _ops as _ops  # defines the ops
from . import autograd as autograd
from .activation import ACTIVATIONS, Activation
from .backends import BACKENDS, Backend, Tolerance
from .dispatch import explain, select
from .errors import Unsupported
from .experts import ExpertWeights
from .functional import dequant_mxfp4, dequant_mxfp4_out, localise, mxfp4_moe, qdq_mxfp4, quant_mxfp4, route
from .layout import Layout, TensorSpec
from .nn import MXFP4Experts
from .packed import PackedExperts
from .prepare import prepare, problem_of, repack_expert, unprepare
from .problem import MoEProblem, arch_of

__version__ = "0.1.0"

__all__ = [
    "ACTIVATIONS",
    "BACKENDS",
    "Activation",
    "Backend",
    "ExpertWeights",
    "Layout",
    "MXFP4Experts",
    "MoEProblem",
    "PackedExperts",
    "TensorSpec",
    "Tolerance",
    "Unsupported",
    "arch_of",
    "dequant_mxfp4",
    "dequant_mxfp4_out",
    "explain",
    "localise",
    "mxfp4_moe",
    "prepare",
    "problem_of",
    "qdq_mxfp4",
    "quant_mxfp4",
    "repack_expert",
    "route",
    "select",
    "unprepare",
]
