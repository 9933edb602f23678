"""Random problems for test_isa_moe.py: pack, run without torch, and what is to come out."""

import kernels_reference as ref
import mxfp4_ops._kernels as kernels  # an error, not a skip, when it was not built
import numpy as np
from kernels_reference import BF16, F16, F32, F64, guarded


class Layer:
    """Random weights of one problem, and calls of the layer on them."""

    def __init__(self, name, hidden=96, intermediate=160, experts=5, seed=11, bias=True):
        rng = np.random.default_rng(seed)
        self.name, self.code = name, ref.ACTIVATIONS.index(name)
        self.hidden, self.intermediate, self.experts = hidden, intermediate, experts
        halves = 2 if self.code < ref.GATED else 1
        rows = halves * intermediate
        self.codes13 = rng.integers(0, 16, (experts, rows, hidden)).astype(np.uint8)
        self.codes2 = rng.integers(0, 16, (experts, hidden, intermediate)).astype(np.uint8)
        self.scales13 = rng.integers(121, 127, (experts, rows, hidden // 32)).astype(np.uint8)
        self.scales2 = rng.integers(121, 127, (experts, hidden, intermediate // 32)).astype(np.uint8)
        self.b13 = rng.standard_normal((experts, rows)).astype(np.float16).astype(np.float32) if bias else None
        self.b2 = rng.standard_normal((experts, hidden)).astype(np.float16).astype(np.float32) if bias else None
        self.halves = halves
        self.alpha, self.beta, self.limit = (1.5, 2.0, np.inf) if name == "situ" else (1.702, 1.0, 7.0)
        self.pack()

    def pack(self):
        self.w13 = guarded(ref.pack_matrix(self.codes13, self.scales13, self.halves))
        self.w2 = guarded(ref.pack_matrix(self.codes2, self.scales2, 1))

    def biases(self, dtype):
        if self.b13 is None:
            return None, None
        convert = {F32: np.float32, F16: np.float16, F64: np.float64}
        parts = np.split(self.b13, self.halves, axis=1)
        b13 = np.concatenate([ref.pad(part, 1, ref.pad64(self.intermediate), 0) for part in parts], axis=1)
        b2 = ref.pad(self.b2, 1, ref.pad64(self.hidden), 0)
        return tuple(guarded(ref.bf16_bits(b) if dtype == BF16 else b.astype(convert[dtype])) for b in (b13, b2))

    def run(self, isa, x, ids, weights, dtype, threads=1, fill=255, bias_dtype=F32, on_input=False, invariant=False):
        b13, b2 = self.biases(bias_dtype)
        out = guarded(np.full(x.shape, 0xAAAA if dtype != F32 else -7, x.dtype))
        kernels.moe(
            isa=isa,
            threads=threads,
            fill=fill,
            x=guarded(x),
            dtype=dtype,
            topk_ids=guarded(ids),
            topk_weights=guarded(weights),
            w13=self.w13,
            w13_bias=b13,
            w2=self.w2,
            w2_bias=b2,
            bias_dtype=bias_dtype,
            intermediate=self.intermediate,
            activation=self.code,
            alpha=self.alpha,
            beta=self.beta,
            limit=self.limit,
            weight_on_input=on_input,
            batch_invariant=invariant,
            out=out,
        )
        return out

    def expected(self, x, ids, weights, dtype, on_input=False):
        w13, w2 = ref.dequant(self.codes13, self.scales13), ref.dequant(self.codes2, self.scales2)
        with np.errstate(invalid="ignore", over="ignore"):
            return ref.moe(x, ids, weights, w13, self.b13, w2, self.b2, self.name, self.alpha, self.beta, self.limit,
                           on_input, dtype != F32)  # fmt: skip


def encode(x: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == F32:
        return x.astype(np.float32)
    return ref.bf16_bits(x) if dtype == BF16 else x.astype(np.float16).view(np.uint16)


def decode(raw: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == F32:
        return raw
    return ref.bf16_values(raw) if dtype == BF16 else raw.view(np.float16).astype(np.float32)


def routing(rng, tokens, top_k, experts):
    ids = rng.integers(-1, experts, (tokens, top_k)).astype(np.int32)
    weights = rng.random((tokens, top_k)).astype(np.float32)
    weights[ids < 0] = np.nan  # a skipped slot contributes nothing whatever its weight is
    if tokens > 2:
        ids[2] = -1
    return ids, weights


TOLERANCE = {F32: 1e-5, BF16: 2.6e-3, F16: 2.0e-3}


def relative_error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)
