// The schemas of the leaf ops, for processes without Python: load this library, then _C_cpu.so, then a package made by
// AOTInductor. With Python, _schemas.py defines them, and the package never loads this.
//
// The texts are those of LEAVES in _schemas.py; tests/test_export.py compares.
#include <torch/csrc/stable/library.h>

#include <exception>

namespace {

constexpr const char* kSchemas[] = {
    "_native_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale, Tensor? w13_bias, "
    "Tensor w2, Tensor w2_scale, Tensor? w2_bias, int hidden, int intermediate, int activation, float alpha, "
    "float? beta, float? limit, bool weight_on_input, bool batch_invariant) -> Tensor",
    "_native_route(Tensor logits, Tensor? bias, Tensor? given, int top_k, int score, int groups, int topk_groups, "
    "bool renormalize, float scale) -> (Tensor, Tensor)",
    "_native_quant(Tensor x, int scale_rule) -> (Tensor, Tensor)",
    "_native_dequant(Tensor blocks, Tensor scales, int dtype) -> Tensor",
    "_native_dequant_out(Tensor blocks, Tensor scales, Tensor(a!) out) -> ()",
    "_native_qdq(Tensor x, int scale_rule) -> Tensor",
    "_native_cpu_isa() -> str",
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mxfp4, m) {
    for (const char* schema : kSchemas) {
        try {
            m.def(schema);
        } catch (const std::exception&) {
            // The Python package is in this process and was first. An exception out of here would end the process.
        }
    }
}
