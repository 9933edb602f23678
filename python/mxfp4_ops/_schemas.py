"""The schema of every op in the namespace ``mxfp4``: the contract that graphs, files and other people's code rely on.

An op grows by keyword arguments with defaults and never by a change of meaning: compile caches do not see fakes, so a
changed rule for shapes or dtypes needs a new name. No op has a keyword-only tensor, which torch would not
differentiate. Arguments are documented on the functions of ``functional.py``.
"""

from __future__ import annotations

_SIX = "Tensor w13, Tensor w13_scale, Tensor? w13_bias, Tensor w2, Tensor w2_scale, Tensor? w2_bias"
_ACTIVATION = 'str activation="silu", float? alpha=None, float? beta=None, float? limit=None'
_PREPARE = f"str layout, bool interleaved=False, {_ACTIVATION}"
_MOE = (
    f"(Tensor x, Tensor topk_ids, Tensor topk_weights, {_SIX}, Tensor[] aux, Tensor? expert_ids=None, "
    "Tensor? x_scale=None, *, str layout, int hidden, int intermediate, "
    f'{_ACTIVATION}, str x_format="none", bool weight_on_input=False, bool batch_invariant=False) -> Tensor'
)

PUBLIC = {
    "moe": _MOE,
    "route": (
        "(Tensor logits, Tensor? correction_bias, Tensor? input_ids, Tensor? hash_table, int top_k, *, "
        'str method="softmax_topk", int groups=1, int topk_groups=1, bool renormalize=True, float scale=1.0) '
        "-> (Tensor topk_ids, Tensor topk_weights)"
    ),
    "quant": '(Tensor x, *, str scale_rule="even") -> (Tensor blocks, Tensor scales)',
    "dequant": "(Tensor blocks, Tensor scales, *, ScalarType? dtype=None) -> Tensor",
    "dequant_out": "(Tensor blocks, Tensor scales, Tensor(a!) out) -> ()",
    "qdq": '(Tensor x, *, str scale_rule="even") -> Tensor',
    "prepare_moe": f"({_SIX}, *, {_PREPARE}) -> Tensor[]",
    "unprepare_moe": "(Tensor[] packed, *, str layout, int hidden, int intermediate, bool gated=True) -> Tensor[]",
    "repack_expert": f"(Tensor(a!)[] packed, int expert, {_SIX}, *, {_PREPARE}) -> ()",
    "localise": "(Tensor topk_ids, Tensor expert_ids) -> Tensor",
}

# The names and positional forms that SGLang and vLLM use. They vanish in compiled graphs.
ALIASES = {
    "mxfp4_moe": _MOE,
    "dequant_mxfp4": "(Tensor x, Tensor scale, ScalarType float_dtype) -> Tensor",
    "qdq_mxfp4": '(Tensor x, str scale_calculation_mode="even") -> Tensor',
}

# Leaves: plain tensors and numbers, no strings. The compiled library of a device registers their kernels and nothing
# else. _native_moe refuses every tensor that does not fit; the others rely on the checks of their ops.
LEAVES = {
    "_native_moe": (
        f"(Tensor x, Tensor topk_ids, Tensor topk_weights, {_SIX}, int hidden, int intermediate, int activation, "
        "float alpha, float beta, float limit, bool weight_on_input, bool batch_invariant) -> Tensor"
    ),
    "_native_quant": "(Tensor x, int scale_rule) -> (Tensor, Tensor)",
    "_native_dequant": "(Tensor blocks, Tensor scales, ScalarType dtype) -> Tensor",
    "_native_dequant_out": "(Tensor blocks, Tensor scales, Tensor(a!) out) -> ()",
    "_native_qdq": "(Tensor x, int scale_rule) -> Tensor",
    "_native_cpu_isa": "() -> str",
}
