// The boundary to torch: tensors in, memory and threads, tensors out. LibTorch stable ABI only, so that one binary
// serves every torch from 2.11 on; the only file of csrc/cpu that knows torch.
//
// Schemas are defined in Python or by schemas.cpp, best before this library is loaded. Programs that were exported call
// these kernels without the checks in Python, so each one refuses what it cannot read.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "isa.h"
#include "moe.h"
#include "parallel_tasks.h"
#include "route.h"

namespace mxfp4::cpu {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Not STD_TORCH_CHECK: it makes its text with a stream, and g++ may link libstdc++ into this library while torch uses
// another copy. There (Ubuntu 24.04, torch 2.11), refusals with it ended in a segmentation fault, and without it do
// not.
void require(bool ok, const char* what) {
    if (!ok) throw std::runtime_error(std::string("mxfp4_ops: the CPU kernels do not take this: ") + what);
}

// torch passes None where a schema says Tensor, as a tensor without memory, and asking that one for anything but this
// ends the process in torch 2.11.
void require_defined(std::initializer_list<const Tensor*> tensors) {
    for (const Tensor* tensor : tensors) require(tensor->defined(), "a tensor is None");
}

constexpr int64_t kChunk = 4096;  // elements that conversions take at once: 16 KiB of fp32 stay in L1

Dtype dtype_of(ScalarType type) {
    switch (type) {
        case ScalarType::Float:
            return Dtype::f32;
        case ScalarType::BFloat16:
            return Dtype::bf16;
        case ScalarType::Half:
            return Dtype::f16;
        case ScalarType::Double:
            return Dtype::f64;
        default:
            throw std::runtime_error("mxfp4_ops: dtype");
    }
}

// The dtype that a schema names by its place in FLOAT_DTYPES of format.py.
ScalarType scalar_type_of(int64_t code) {
    switch (code) {
        case static_cast<int64_t>(Dtype::f32):
            return ScalarType::Float;
        case static_cast<int64_t>(Dtype::bf16):
            return ScalarType::BFloat16;
        case static_cast<int64_t>(Dtype::f16):
            return ScalarType::Half;
        default:
            throw std::runtime_error("mxfp4_ops: dtype");
    }
}

// torch's own threads, as many as torch.set_num_threads allows.
Threads torch_threads() {
    return {static_cast<int64_t>(torch::stable::get_num_threads()),
            [](int64_t n, const std::function<void(int64_t)>& body) {
                torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; i++) body(i);
                });
            }};
}

std::vector<int64_t> shape_with_last(const Tensor& tensor, int64_t last) {
    const auto sizes = tensor.sizes();
    std::vector<int64_t> shape(sizes.begin(), sizes.end());
    require(!shape.empty() && tensor.is_cpu() && tensor.is_contiguous(), "a contiguous tensor on the CPU is needed");
    shape.back() = last;
    return shape;
}

// Calls body(first, n) for chunks of whole blocks that cover the elements of a tensor.
template <class Body>
void for_chunks(int64_t elements, Body body) {
    const int64_t chunks = (elements + kChunk - 1) / kChunk;
    parallel_tasks(torch_threads(), chunks, elements,
                   [&](int64_t, int64_t chunk) { body(chunk * kChunk, std::min(kChunk, elements - chunk * kChunk)); });
}

bool is_byte(const Tensor& tensor) {
    return tensor.scalar_type() == ScalarType::Byte;
}

void check_quant(const Tensor& x, int64_t scale_rule) {
    require_defined({&x});
    require(x.dim() > 0 && x.size(-1) % kBlock == 0, "last dimension");
    require(x.scalar_type() != ScalarType::Double, "dtype");
    require(scale_rule >= 0 && scale_rule <= static_cast<int64_t>(ScaleRule::rceil), "scale rule");
}

void check_dequant(const Tensor& blocks, const Tensor& scales) {
    require_defined({&blocks, &scales});
    require(is_byte(blocks) && is_byte(scales), "blocks and scales are bytes");
    require(shape_with_last(blocks, 0) == shape_with_last(scales, 0) && blocks.size(-1) * 2 % kBlock == 0 &&
                blocks.size(-1) * 2 == scales.size(-1) * kBlock,
            "scales do not match blocks");
}

std::tuple<Tensor, Tensor> native_quant(const Tensor& x, int64_t scale_rule) {
    const Kernels& k = kernels();
    check_quant(x, scale_rule);
    const int64_t n = x.size(-1);
    Tensor blocks = torch::stable::new_empty(x, shape_with_last(x, n / 2), ScalarType::Byte);
    Tensor scales = torch::stable::new_empty(x, shape_with_last(x, n / kBlock), ScalarType::Byte);
    const Dtype dtype = dtype_of(x.scalar_type());
    const auto* src = static_cast<const char*>(x.const_data_ptr());
    auto* codes = static_cast<uint8_t*>(blocks.mutable_data_ptr());
    auto* bytes = static_cast<uint8_t*>(scales.mutable_data_ptr());
    for_chunks(x.numel(), [&](int64_t first, int64_t count) {
        float values[kChunk];
        k.to_float(src + first * dtype_bytes(dtype), dtype, values, count);
        k.quant(values, count, static_cast<ScaleRule>(scale_rule), codes + first / 2, bytes + first / kBlock);
    });
    return {blocks, scales};
}

void native_dequant_out(const Tensor& blocks, const Tensor& scales, const Tensor& out) {
    const Kernels& k = kernels();
    check_dequant(blocks, scales);
    require_defined({&out});
    require(out.is_cpu() && out.is_contiguous() && out.numel() == blocks.numel() * 2, "out");
    const Dtype dtype = dtype_of(out.scalar_type());
    const auto* codes = static_cast<const uint8_t*>(blocks.const_data_ptr());
    const auto* bytes = static_cast<const uint8_t*>(scales.const_data_ptr());
    auto* dst = static_cast<char*>(out.mutable_data_ptr());
    for_chunks(out.numel(), [&](int64_t first, int64_t count) {
        float values[kChunk];
        k.dequant(codes + first / 2, bytes + first / kBlock, count, values);
        k.from_float(values, dtype, dst + first * dtype_bytes(dtype), count);
    });
}

Tensor native_dequant(const Tensor& blocks, const Tensor& scales, int64_t dtype_code) {
    check_dequant(blocks, scales);
    const std::vector<int64_t> shape = shape_with_last(blocks, blocks.size(-1) * 2);
    Tensor out = torch::stable::new_empty(blocks, shape, scalar_type_of(dtype_code));
    native_dequant_out(blocks, scales, out);
    return out;
}

Tensor native_qdq(const Tensor& x, int64_t scale_rule) {
    const Kernels& k = kernels();
    check_quant(x, scale_rule);
    Tensor out = torch::stable::new_empty(x, shape_with_last(x, x.size(-1)), x.scalar_type());
    const Dtype dtype = dtype_of(x.scalar_type());
    const auto* src = static_cast<const char*>(x.const_data_ptr());
    auto* dst = static_cast<char*>(out.mutable_data_ptr());
    for_chunks(x.numel(), [&](int64_t first, int64_t count) {
        float values[kChunk];
        uint8_t codes[kChunk / 2], bytes[kChunk / kBlock];
        k.to_float(src + first * dtype_bytes(dtype), dtype, values, count);
        k.quant(values, count, static_cast<ScaleRule>(scale_rule), codes, bytes);
        k.dequant(codes, bytes, count, values);
        k.from_float(values, dtype, dst + first * dtype_bytes(dtype), count);
    });
    return out;
}

Bias bias_of(const std::optional<Tensor>& bias) {
    if (!bias.has_value()) return {nullptr, Dtype::f32};
    return {bias->const_data_ptr(), dtype_of(bias->scalar_type())};
}

// Whether a tensor is contiguous on the CPU with these sizes.
bool is_plain(const Tensor& tensor, std::initializer_list<int64_t> wanted) {
    const auto sizes = tensor.sizes();
    return tensor.is_cpu() && sizes.size() == wanted.size() && std::equal(sizes.begin(), sizes.end(), wanted.begin()) &&
           tensor.is_contiguous();
}

bool is_packed(const Tensor& weights, int64_t experts, int64_t rows, int64_t columns) {
    return is_byte(weights) && is_plain(weights, {experts, rows / kTileRows, columns / kSuperK, kSuperBytes});
}

bool is_bias(const std::optional<Tensor>& bias, int64_t experts, int64_t width) {
    return !bias.has_value() || is_plain(*bias, {experts, width});
}

// Refuses, before any work, whatever the checks in Python would refuse: they come after this one, to say the sentence,
// or to bring unusual input into this form.
void check_moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13,
               const Tensor& w13_scale, const std::optional<Tensor>& w13_bias, const Tensor& w2, const Tensor& w2_scale,
               const std::optional<Tensor>& w2_bias, int64_t hidden, int64_t intermediate, int64_t activation) {
    const auto padded = [](int64_t n) { return (n + kSuperK - 1) / kSuperK * kSuperK; };
    const auto rows_of = [&](int64_t n) { return padded(n) * (is_gated(static_cast<Activation>(activation)) ? 2 : 1); };
    require_defined({&x, &topk_ids, &topk_weights, &w13, &w13_scale, &w2, &w2_scale});
    require(hidden > 0 && hidden % kBlock == 0 && intermediate > 0 && intermediate % kBlock == 0, "sizes");
    require(x.dim() == 2 && topk_ids.dim() == 2 && w13.dim() == 4, "dimensions");
    const int64_t tokens = x.size(0), top_k = topk_ids.size(1), experts = w13.size(0);
    require(x.scalar_type() != ScalarType::Double && is_plain(x, {tokens, hidden}), "x");
    require(top_k > 0 && is_plain(topk_ids, {tokens, top_k}), "topk_ids");
    require(topk_weights.scalar_type() == ScalarType::Float && is_plain(topk_weights, {tokens, top_k}), "topk_weights");
    require(is_packed(w13, experts, rows_of(intermediate), padded(hidden)) &&
                is_packed(w2, experts, padded(hidden), padded(intermediate)),
            "weights");
    require(is_plain(w13_scale, {experts, 0}) && is_plain(w2_scale, {experts, 0}) && is_byte(w13_scale) &&
                is_byte(w2_scale),
            "scales are inside the weights");
    require(is_bias(w13_bias, experts, rows_of(intermediate)) && is_bias(w2_bias, experts, padded(hidden)), "biases");
}

// Uninitialized, contiguous, on the CPU. Not through the dispatcher, which costs 10 us when it is not in the caches.
template <size_t dims>
Tensor empty(const int64_t (&sizes)[dims], int32_t dtype) {
    int64_t strides[dims];
    int64_t stride = 1;
    for (size_t d = dims; d-- > 0; stride *= sizes[d]) strides[d] = stride;
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(dims, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
    return Tensor(handle);
}

int32_t dtype_code(const Tensor& tensor) {
    int32_t code;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
    return code;
}

// int32 or int64 ids as int32, each one in -1 .. experts - 1: this is the check of the CPU, before any work. Python
// turns it into a sentence.
template <class Id>
std::vector<int32_t> checked_ids(const Tensor& topk_ids, int64_t experts) {
    const auto* ids = static_cast<const Id*>(topk_ids.const_data_ptr());
    std::vector<int32_t> checked(static_cast<size_t>(topk_ids.numel()));
    for (size_t i = 0; i < checked.size(); i++) {
        require(ids[i] >= -1 && ids[i] < experts, "expert id");
        checked[i] = static_cast<int32_t>(ids[i]);
    }
    return checked;
}

Tensor native_moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13,
                  const Tensor& w13_scale, const std::optional<Tensor>& w13_bias, const Tensor& w2,
                  const Tensor& w2_scale, const std::optional<Tensor>& w2_bias, int64_t hidden, int64_t intermediate,
                  int64_t activation, double alpha, std::optional<double> beta, std::optional<double> limit,
                  bool weight_on_input, bool batch_invariant) {
    check_moe(x, topk_ids, topk_weights, w13, w13_scale, w13_bias, w2, w2_scale, w2_bias, hidden, intermediate,
              activation);
    const bool wide = topk_ids.scalar_type() == ScalarType::Long;
    require(wide || topk_ids.scalar_type() == ScalarType::Int, "dtype of ids");
    const std::vector<int32_t> ids =
        wide ? checked_ids<int64_t>(topk_ids, w13.size(0)) : checked_ids<int32_t>(topk_ids, w13.size(0));
    const Kernels& k = kernels();
    const Threads threads = torch_threads();
    Tensor out = empty({x.size(0), hidden}, dtype_code(x));
    MoeArgs args{};
    args.tokens = x.size(0);
    args.hidden = hidden;
    args.intermediate = intermediate;
    args.experts = w13.size(0);
    args.top_k = topk_ids.size(1);
    args.dtype = dtype_of(x.scalar_type());
    args.x = x.const_data_ptr();
    args.topk_ids = ids.data();
    args.topk_weights = static_cast<const float*>(topk_weights.const_data_ptr());
    args.w13 = static_cast<const uint8_t*>(w13.const_data_ptr());
    args.w13_bias = bias_of(w13_bias);
    args.w2 = static_cast<const uint8_t*>(w2.const_data_ptr());
    args.w2_bias = bias_of(w2_bias);
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    args.activation = {static_cast<Activation>(activation), static_cast<float>(alpha),
                       static_cast<float>(beta.value_or(kInfinity)), static_cast<float>(limit.value_or(kInfinity))};
    args.weight_on_input = weight_on_input;
    args.batch_invariant = batch_invariant;
    args.out = out.mutable_data_ptr();
    Tensor workspace = empty({moe_workspace_bytes(k, args, threads.count)}, aoti_torch_dtype_uint8());
    moe(k, args, workspace.mutable_data_ptr(), threads);
    return out;
}

void check_route(const Tensor& logits, const std::optional<Tensor>& bias, const std::optional<Tensor>& given,
                 int64_t top_k, int64_t score, int64_t groups, int64_t topk_groups) {
    require_defined({&logits});
    require(logits.dim() == 2, "dimensions");
    const int64_t tokens = logits.size(0), experts = logits.size(1);
    require(is_plain(logits, {tokens, experts}) && experts <= INT32_MAX, "logits");
    require(groups > 0 && experts % groups == 0 && topk_groups > 0 && topk_groups <= groups, "groups");
    require(top_k > 0 && top_k <= experts / groups * topk_groups, "top_k");
    require(score >= 0 && score <= static_cast<int64_t>(Score::sqrtsoftplus), "score");
    require(!bias.has_value() || (bias->scalar_type() == ScalarType::Float && is_plain(*bias, {experts})), "bias");
    if (!given.has_value()) return;
    require(given->scalar_type() == ScalarType::Int && is_plain(*given, {tokens, top_k}), "given experts");
    const auto* ids = static_cast<const int32_t*>(given->const_data_ptr());
    for (int64_t i = 0; i < tokens * top_k; i++) require(ids[i] >= -1 && ids[i] < experts, "expert id");
}

std::tuple<Tensor, Tensor> native_route(const Tensor& logits, const std::optional<Tensor>& bias,
                                        const std::optional<Tensor>& given, int64_t top_k, int64_t score,
                                        int64_t groups, int64_t topk_groups, bool renormalize, double scale) {
    check_route(logits, bias, given, top_k, score, groups, topk_groups);
    const Threads threads = torch_threads();
    Tensor ids = empty({logits.size(0), top_k}, aoti_torch_dtype_int32());
    Tensor weights = empty({logits.size(0), top_k}, aoti_torch_dtype_float32());
    RouteArgs args{};
    args.tokens = logits.size(0);
    args.experts = logits.size(1);
    args.top_k = top_k;
    args.groups = groups;
    args.topk_groups = topk_groups;
    args.score = static_cast<Score>(score);
    args.renormalize = renormalize;
    args.scale = static_cast<float>(scale);
    args.dtype = dtype_of(logits.scalar_type());
    args.logits = logits.const_data_ptr();
    args.bias = bias.has_value() ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
    args.given = given.has_value() ? static_cast<const int32_t*>(given->const_data_ptr()) : nullptr;
    args.ids = static_cast<int32_t*>(ids.mutable_data_ptr());
    args.weights = static_cast<float*>(weights.mutable_data_ptr());
    Tensor workspace = empty({route_workspace_bytes(args, threads.count)}, aoti_torch_dtype_uint8());
    route(kernels(), args, workspace.mutable_data_ptr(), threads);
    return {ids, weights};
}

std::string native_cpu_isa() {
    return kernels().name;
}

}  // namespace
}  // namespace mxfp4::cpu

STABLE_TORCH_LIBRARY_IMPL(mxfp4, CPU, m) {
    m.impl("_native_moe", TORCH_BOX(&mxfp4::cpu::native_moe));
    m.impl("_native_route", TORCH_BOX(&mxfp4::cpu::native_route));
    m.impl("_native_quant", TORCH_BOX(&mxfp4::cpu::native_quant));
    m.impl("_native_dequant", TORCH_BOX(&mxfp4::cpu::native_dequant));
    m.impl("_native_dequant_out", TORCH_BOX(&mxfp4::cpu::native_dequant_out));
    m.impl("_native_qdq", TORCH_BOX(&mxfp4::cpu::native_qdq));
}

// Without tensors there is no CPU key to dispatch on; this key also answers calls that carry none.
STABLE_TORCH_LIBRARY_IMPL(mxfp4, CompositeExplicitAutograd, m) {
    m.impl("_native_cpu_isa", TORCH_BOX(&mxfp4::cpu::native_cpu_isa));
}
