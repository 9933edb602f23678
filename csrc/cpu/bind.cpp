// mxfp4_ops._kernels: every kernel of every ISA table, callable one by one on numpy buffers. For tests only; knows no
// torch. Each function takes the name of a table of this CPU first. 16-bit floats travel as uint16 bits.
//
// Buffers are passed through without copies, so that a test can put them next to an inaccessible page.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "isa.h"
#include "moe.h"

namespace py = pybind11;
using namespace mxfp4;
using namespace mxfp4::cpu;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;  // no forcecast: a wrong dtype is refused

template <class T>
const T* data_or_null(const py::object& array) {
    return array.is_none() ? nullptr : static_cast<const T*>(py::cast<py::array>(array).data());
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Kernels* table : available_kernels()) names.emplace_back(table->name);
    return names;
}

Array<float> to_float(const std::string& isa, const py::array& src, int dtype) {
    Array<float> out(src.size());
    kernels_named(isa).to_float(src.data(), static_cast<Dtype>(dtype), out.mutable_data(), src.size());
    return out;
}

Array<uint16_t> from_float(const std::string& isa, const Array<float>& src, int dtype) {
    Array<uint16_t> out(src.size());
    kernels_named(isa).from_float(src.data(), static_cast<Dtype>(dtype), out.mutable_data(), src.size());
    return out;
}

py::tuple quant(const std::string& isa, const Array<float>& x, int rule) {
    Array<uint8_t> blocks(x.size() / 2), scales(x.size() / kBlock);
    kernels_named(isa).quant(x.data(), x.size(), static_cast<ScaleRule>(rule), blocks.mutable_data(),
                             scales.mutable_data());
    return py::make_tuple(blocks, scales);
}

Array<float> dequant(const std::string& isa, const Array<uint8_t>& blocks, const Array<uint8_t>& scales) {
    Array<float> out(blocks.size() * 2);
    kernels_named(isa).dequant(blocks.data(), scales.data(), out.size(), out.mutable_data());
    return out;
}

// [m, 32] zeros, which kernels add to.
Array<float> new_acc(py::ssize_t m) {
    Array<float> acc({m, py::ssize_t{kTileRows}});
    std::fill_n(acc.mutable_data(), acc.size(), 0.0f);
    return acc;
}

std::shared_ptr<void> panel_scratch() {
    return {aligned_alloc(64, kPanelBytes), free};
}

template <class T>
std::vector<const T*> row_pointers(const Array<T>& rows) {
    std::vector<const T*> pointers;
    for (py::ssize_t i = 0; i < rows.shape(0); i++) pointers.push_back(rows.data(i, 0));
    return pointers;
}

// kind: "few" or "many". tile [supers * 1088], rows [m, supers * 64] -> [m, 32]
Array<float> dot(const std::string& isa, const std::string& kind, const Array<uint8_t>& tile,
                 const Array<float>& rows) {
    const Kernels& k = kernels_named(isa);
    Array<float> acc = new_acc(rows.shape(0));
    const TileDot kernel = kind == "few" ? k.few : k.many;
    kernel(tile.data(), tile.size() / kSuperBytes, row_pointers(rows).data(), rows.shape(0), panel_scratch().get(),
           acc.mutable_data());
    return acc;
}

// None when the ISA has no bf16 kernel or when it declines this tile.
py::object dot_bf16(const std::string& isa, const std::string& kind, const Array<uint8_t>& tile,
                    const Array<uint16_t>& rows) {
    const Kernels& k = kernels_named(isa);
    const TileDotBf16 kernel = kind == "few" ? k.few_bf16 : k.many_bf16;
    Array<float> acc = new_acc(rows.shape(0));
    if (kernel == nullptr || !kernel(tile.data(), tile.size() / kSuperBytes, row_pointers(rows).data(), rows.shape(0),
                                     panel_scratch().get(), acc.mutable_data())) {
        return py::none();
    }
    return acc;
}

// A row in integers with the memory that it points to.
struct OwnedIntRow {
    OwnedIntRow(const Kernels& k, const Array<float>& values)
        : blocks(static_cast<size_t>(values.size() / kBlock)),
          residuals(static_cast<size_t>(values.size() / kResidualShare)),
          row{values.data(), blocks.data(), residuals.data(), 0, 0} {
        k.quantize_row(values.size(), &row);
    }

    std::vector<IntBlock> blocks;
    std::vector<Residual> residuals;
    IntRow row;
};

// None when the ISA has no integer rows; else (planes, q [k] int32, factors [k/32], residual k, residual values).
py::object quantize_row(const std::string& isa, const Array<float>& values) {
    const Kernels& k = kernels_named(isa);
    if (k.quantize_row == nullptr) return py::none();
    const OwnedIntRow owned(k, values);
    Array<int32_t> q(values.size()), residual_k(owned.row.residual_count);
    Array<float> factors(values.size() / kBlock), residual_values(owned.row.residual_count);
    for (py::ssize_t i = 0; owned.row.planes != 0 && i < values.size(); i++) {
        const IntBlock& block = owned.row.blocks[i / kBlock];
        int32_t value = 0;
        for (int p = 0; p < owned.row.planes; p++) value = value * 256 + block.planes[p][i % kBlock];
        q.mutable_data()[i / kStepK * kStepK + kIntOrder[i % kStepK]] = value;
        factors.mutable_data()[i / kBlock] = block.factor;
    }
    for (int64_t i = 0; i < owned.row.residual_count; i++) {
        residual_k.mutable_data()[i] = owned.row.residuals[i].k;
        residual_values.mutable_data()[i] = owned.row.residuals[i].value;
    }
    return py::make_tuple(owned.row.planes, q, factors, residual_k, residual_values);
}

// tiles [count * supers * 1088], m rows of [supers * 64] -> [count, m, 32]; None when a row needs an fp32 kernel or
// they differ in planes. `repeat` is for timing: the kernel adds its sums so often.
py::object dot_int(const std::string& isa, const Array<uint8_t>& tiles, const std::vector<Array<float>>& values,
                   int repeat) {
    const Kernels& k = kernels_named(isa);
    if (k.dot_int == nullptr) return py::none();
    std::vector<std::unique_ptr<OwnedIntRow>> owned;
    std::vector<const IntRow*> rows;
    const int64_t supers = values[0].size() / kSuperK, count = tiles.size() / (supers * kSuperBytes);
    const auto m = static_cast<int64_t>(values.size());
    Array<float> out({count, m, int64_t{kTileRows}});
    std::fill_n(out.mutable_data(), out.size(), 0.0f);
    std::vector<float*> acc;
    for (int64_t i = 0; i < m; i++) {
        owned.push_back(std::make_unique<OwnedIntRow>(k, values[static_cast<size_t>(i)]));
        rows.push_back(&owned.back()->row);
        acc.push_back(out.mutable_data() + i * kTileRows);
        if (rows[static_cast<size_t>(i)]->planes == 0 || rows[static_cast<size_t>(i)]->planes != rows[0]->planes)
            return py::none();
    }
    for (int i = 0; i < repeat; i++)
        k.dot_int({tiles.data(), count, supers, rows.data(), m, panel_scratch().get(), acc.data(), m * kTileRows});
    return out;
}

int range(const std::string& isa, const Array<float>& x, float tiny) {
    return kernels_named(isa).range(x.data(), x.size(), tiny);
}

// tile [m, 32] in place
void activate(const std::string& isa, Array<float> tile, int activation, float alpha, float beta, float limit) {
    kernels_named(isa).activate({static_cast<Activation>(activation), alpha, beta, limit}, tile.mutable_data(),
                                tile.shape(0));
}

void accumulate(const std::string& isa, Array<float> acc, const Array<float>& y, float w) {
    kernels_named(isa).accumulate(acc.mutable_data(), y.data(), w, acc.size());
}

void run_on_std_threads(int64_t n, const std::function<void(int64_t)>& body) {
    std::vector<std::thread> others;
    for (int64_t i = 1; i < n; i++) others.emplace_back(body, i);
    body(0);
    for (std::thread& other : others) other.join();
}

// The whole layer. out has the dtype of x; `fill` is written over the workspace first.
void run_moe(const std::string& isa, int64_t threads, int fill, const py::array& x, int dtype,
             const Array<int32_t>& topk_ids, const Array<float>& topk_weights, const Array<uint8_t>& w13,
             const py::object& w13_bias, const Array<uint8_t>& w2, const py::object& w2_bias, int bias_dtype,
             int64_t intermediate, int activation, float alpha, float beta, float limit, bool weight_on_input,
             bool batch_invariant, py::array out) {
    const Kernels& k = kernels_named(isa);
    MoeArgs args{};
    args.tokens = x.shape(0);
    args.hidden = x.shape(1);
    args.intermediate = intermediate;
    args.experts = w13.shape(0);
    args.top_k = topk_ids.shape(1);
    args.dtype = static_cast<Dtype>(dtype);
    args.x = x.data();
    args.topk_ids = topk_ids.data();
    args.topk_weights = topk_weights.data();
    args.w13 = w13.data();
    args.w13_bias = {data_or_null<void>(w13_bias), static_cast<Dtype>(bias_dtype)};
    args.w2 = w2.data();
    args.w2_bias = {data_or_null<void>(w2_bias), static_cast<Dtype>(bias_dtype)};
    args.activation = {static_cast<Activation>(activation), alpha, beta, limit};
    args.weight_on_input = weight_on_input;
    args.batch_invariant = batch_invariant;
    args.out = out.mutable_data();
    std::vector<uint8_t> workspace(static_cast<size_t>(moe_workspace_bytes(k, args, threads)),
                                   static_cast<uint8_t>(fill));
    py::gil_scoped_release release;
    moe(k, args, workspace.data(), {threads, run_on_std_threads});
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
    m.doc() = "Kernels of every instruction set of this CPU, for tests.";
    m.def("isas", &isas, "Names of the tables that this CPU can run, lowest first.");
    m.def("chosen", [] { return std::string(kernels().name); }, "The table that the ops use.");
    m.def("to_float", &to_float);
    m.def("from_float", &from_float);
    m.def("quant", &quant);
    m.def("dequant", &dequant);
    m.def("dot", &dot);
    m.def("dot_bf16", &dot_bf16);
    m.def("quantize_row", &quantize_row);
    m.def("dot_int", &dot_int, py::arg("isa"), py::arg("tiles"), py::arg("values"), py::arg("repeat") = 1);
    m.def("range", &range);
    m.def("activate", &activate);
    m.def("accumulate", &accumulate);
    m.def("moe", &run_moe, py::kw_only(), py::arg("isa"), py::arg("threads"), py::arg("fill"), py::arg("x"),
          py::arg("dtype"), py::arg("topk_ids"), py::arg("topk_weights"), py::arg("w13"), py::arg("w13_bias"),
          py::arg("w2"), py::arg("w2_bias"), py::arg("bias_dtype"), py::arg("intermediate"), py::arg("activation"),
          py::arg("alpha"), py::arg("beta"), py::arg("limit"), py::arg("weight_on_input"), py::arg("batch_invariant"),
          py::arg("out"));
}
