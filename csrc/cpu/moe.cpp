// Runs the layer in three passes over the routed slots (slot = token * top_k + j):
//
//   1  h[slot] = activation(W13[e] x[token] + b13[e])
//   2  y[slot] = W2[e] h[slot] + b2[e]
//   3  out[token] = sum over j of weight * y[slot], slots in order, so that bits never depend on threads
//
// A task of passes 1 and 2 is a few tiles of 32 weight rows for the rows of one expert; of pass 3, a token. Tasks are
// taken from an atomic counter by all threads.
//
// Slots are grouped by expert with a counting sort; kernels get row pointers, so nothing is gathered. An expert with
// few rows may take them in integers (IntRow): x is split in front of pass 1, and h by whoever finishes its last tile.
#include "moe.h"

#include <float.h>

#include <algorithm>
#include <vector>

#include "../check.h"
#include "parallel_tasks.h"
#include "routing.h"
#include "workspace.h"

namespace mxfp4::cpu {
namespace {

constexpr int64_t kSliceSupers = 8;  // 512 k: what the kernels decode at once
constexpr int64_t kColumns = 512;    // columns that element-wise passes take at once, to stay in L1

// One of the two matrix products of the layer.
struct Product {
    const uint8_t* weights;
    int64_t tiles;             // tiles to compute; padding tiles are left out
    int64_t tiles_per_expert;  // tiles as packed
    int64_t supers;
    Rows rows;              // input rows
    const IntRow* ints;     // the same in integers, or null
    int64_t slots_per_row;  // top_k for x, 1 for h
};

// Some k of one tile and of the rows it meets.
struct Slice {
    const uint8_t* tile;
    int64_t supers;
    const void* const* rows;
    int64_t m;
    Dtype storage;
    bool few;
};

class Layer {
  public:
    Layer(const Kernels& kernels, const MoeArgs& args, void* workspace, const Threads& threads)
        : k_(kernels), a_(args), threads_(threads), shape_(kernels, args), ws_(shape_, threads.count, workspace) {}

    void run() {
        prepare_rows();
        multiply({a_.w13, shape_.w13_tiles, shape_.w13_tiles_packed, shape_.hidden_padded / kSuperK, ws_.x,
                  ws_.x_int.rows, a_.top_k},
                 [this](const Group& group, const TileRange& run, float* acc) { finish_hidden(group, run, acc); });
        multiply({a_.w2, shape_.w2_tiles, shape_.w2_tiles_packed, shape_.intermediate_padded / kSuperK, ws_.h,
                  ws_.h_int.rows, 1},
                 [this](const Group& group, const TileRange& run, float* acc) { finish_output(group, run, acc); });
        combine();
    }

  private:
    void prepare_rows();
    template <class Finish>
    void multiply(const Product& product, Finish finish);
    void multiply_run(const Product& product, const Group& group, const TileRange& run, const ThreadScratch& scratch);
    bool multiply_ints(const Product& product, const Group& group, const TileRange& run, const ThreadScratch& scratch);
    void dot(const Slice& slice, Path path, const ThreadScratch& scratch, float* acc);
    void dot_expanded(const Slice& slice, Path path, const ThreadScratch& scratch, float* acc);
    void add_bias(const Bias& bias, int64_t first, int64_t n, float* tile, int64_t m);
    void finish_hidden(const Group& group, const TileRange& run, float* acc);
    void finish_hidden_tile(const Group& group, int64_t tile, float* acc);
    void finish_output(const Group& group, const TileRange& run, float* acc);
    void combine();

    const Kernels& k_;
    const MoeArgs& a_;
    const Threads& threads_;
    Shape shape_;
    Workspace ws_;
};

// x in the storage type of the kernels, padded with zeros; flags of every row; zeros behind the end of every h.
void Layer::prepare_rows() {
    const int64_t item = dtype_bytes(a_.dtype);
    const float tiny = shape_.tiny(shape_.x_storage);
    parallel_tasks(threads_, a_.tokens, a_.tokens * a_.hidden, [&](int64_t, int64_t t) {
        const char* src = static_cast<const char*>(a_.x) + t * a_.hidden * item;
        char* row = ws_.x.row(t);
        int flags = 0;
        float buffer[kColumns];
        for (int64_t c = 0; c < a_.hidden; c += kColumns) {
            const int64_t n = std::min(kColumns, a_.hidden - c);
            k_.to_float(src + c * item, a_.dtype, buffer, n);
            flags |= k_.range(buffer, n, tiny);
            k_.from_float(buffer, shape_.x_storage, row + c * ws_.x.item, n);
        }
        memset(row + a_.hidden * ws_.x.item, 0, static_cast<size_t>((shape_.hidden_padded - a_.hidden) * ws_.x.item));
        ws_.x.flags[t] = static_cast<uint8_t>(flags);
        if (shape_.x_int) k_.quantize_row(shape_.hidden_padded, ws_.x_int.init(t, ws_.x));
        for (int64_t slot = t * a_.top_k; slot < (t + 1) * a_.top_k; slot++) {
            const int64_t padding = shape_.intermediate_padded - a_.intermediate;
            memset(ws_.h.row(slot) + a_.intermediate * ws_.h.item, 0, static_cast<size_t>(padding * ws_.h.item));
            ws_.h.flags[slot] = 0;
            if (!shape_.h_int) continue;
            ws_.h_int.init(slot, ws_.h);
            ws_.tiles_left[slot] = static_cast<int32_t>(shape_.w13_tiles);
        }
    });
}

template <class Finish>
void Layer::multiply(const Product& product, Finish finish) {
    const auto path_of = [&](int64_t slot) {
        return shape_.path(product.rows.storage, product.rows.flags[slot / product.slots_per_row]);
    };
    const std::vector<Group> groups = group_slots(a_, path_of, ws_.order);
    const std::vector<TileRange> tasks = split_tiles(groups, product.tiles, threads_.count);
    const int64_t work = static_cast<int64_t>(groups.size()) * product.tiles * product.supers * kSuperBytes;
    parallel_tasks(threads_, static_cast<int64_t>(tasks.size()), work, [&](int64_t thread, int64_t index) {
        const TileRange& task = tasks[static_cast<size_t>(index)];
        const Group& group = groups[static_cast<size_t>(task.group)];
        const ThreadScratch scratch = ws_.scratch(thread);
        multiply_run(product, group, task, scratch);
        finish(group, task, scratch.acc);
    });
}

// Sums of a run of tiles. Many rows are taken kSliceSupers at a time through all tiles of the run: that part of them
// stays in L2, where whole rows would come from L3 for every tile.
void Layer::multiply_run(const Product& product, const Group& group, const TileRange& run,
                         const ThreadScratch& scratch) {
    std::fill_n(scratch.acc, (run.end - run.begin) * group.count * kTileRows, 0.0f);
    if (multiply_ints(product, group, run, scratch)) return;
    const bool bf16 = product.rows.storage == Dtype::bf16;
    const bool few = group.count <= (bf16 ? k_.few_limit_bf16 : k_.few_limit) && !a_.batch_invariant;
    const int64_t step = few ? product.supers : kSliceSupers;
    for (int64_t s = 0; s < product.supers; s += step) {
        const void* rows[kMaxRows];
        for (int64_t i = 0; i < group.count; i++) {
            rows[i] = product.rows.row(group.slots[i] / product.slots_per_row) + s * kSuperK * product.rows.item;
        }
        Slice slice{nullptr, std::min(step, product.supers - s), rows, group.count, product.rows.storage, few};
        for (int64_t t = run.begin; t < run.end; t++) {
            const int64_t tile = group.expert * product.tiles_per_expert + t;
            slice.tile = product.weights + (tile * product.supers + s) * kSuperBytes;
            dot(slice, group.path, scratch, scratch.acc + (t - run.begin) * group.count * kTileRows);
        }
    }
}

// The same in integers; false, with nothing done, unless all rows of the group have them.
bool Layer::multiply_ints(const Product& product, const Group& group, const TileRange& run,
                          const ThreadScratch& scratch) {
    if (product.ints == nullptr || group.count > k_.int_limit) return false;
    const auto row_of = [&](int64_t i) { return product.ints + group.slots[i] / product.slots_per_row; };
    for (int64_t i = 0; i < group.count; i++) {
        if (row_of(i)->planes == 0) return false;
    }
    const int64_t first = group.expert * product.tiles_per_expert + run.begin;
    const uint8_t* tiles = product.weights + first * product.supers * kSuperBytes;
    for (int planes = 2; planes <= kPlanes; planes++) {
        const IntRow* rows[kMaxRows];
        float* acc[kMaxRows];
        int64_t m = 0;
        for (int64_t i = 0; i < group.count; i++) {
            if (row_of(i)->planes != planes) continue;
            rows[m] = row_of(i);
            acc[m++] = scratch.acc + i * kTileRows;
        }
        if (m == 0) continue;
        k_.dot_int({tiles, run.end - run.begin, product.supers, rows, m, scratch.panel, acc, group.count * kTileRows});
    }
    return true;
}

void Layer::dot(const Slice& slice, Path path, const ThreadScratch& scratch, float* acc) {
    if (slice.storage == Dtype::bf16) {
        const TileDotBf16 kernel = slice.few ? k_.few_bf16 : k_.many_bf16;
        const auto* rows = reinterpret_cast<const uint16_t* const*>(slice.rows);
        if (path == Path::any && kernel(slice.tile, slice.supers, rows, slice.m, scratch.panel, acc)) return;
        return dot_expanded(slice, path, scratch, acc);
    }
    const TileDot kernel = slice.few && path != Path::weights_scaled ? k_.few : k_.many;
    kernel(slice.tile, slice.supers, reinterpret_cast<const float* const*>(slice.rows), slice.m, scratch.panel, acc);
}

// bf16 rows through the fp32 kernels, a few at a time: rows with extreme values, and tiles with extreme scales.
void Layer::dot_expanded(const Slice& slice, Path path, const ThreadScratch& scratch, float* acc) {
    const TileDot kernel = path == Path::weights_scaled || a_.batch_invariant ? k_.many : k_.few;
    const int64_t width = slice.supers * kSuperK;
    for (int64_t first = 0; first < slice.m; first += kExpandedRows) {
        const int64_t n = std::min<int64_t>(kExpandedRows, slice.m - first);
        const float* expanded[kExpandedRows];
        for (int64_t i = 0; i < n; i++) {
            float* row = scratch.expanded + i * width;
            k_.to_float(slice.rows[first + i], Dtype::bf16, row, width);
            expanded[i] = row;
        }
        kernel(slice.tile, slice.supers, expanded, n, scratch.panel, acc + first * kTileRows);
    }
}

// Adds n entries of the bias to the first n columns of every row of a tile.
void Layer::add_bias(const Bias& bias, int64_t first, int64_t n, float* tile, int64_t m) {
    if (bias.data == nullptr) return;
    float values[kTileRows];
    k_.to_float(static_cast<const char*>(bias.data) + first * dtype_bytes(bias.dtype), bias.dtype, values, n);
    for (int64_t i = 0; i < m; i++) {
        for (int64_t c = 0; c < n; c++) tile[i * kTileRows + c] += values[c];
    }
}

void Layer::finish_hidden(const Group& group, const TileRange& run, float* acc) {
    for (int64_t t = run.begin; t < run.end; t++) {
        finish_hidden_tile(group, t, acc + (t - run.begin) * group.count * kTileRows);
    }
    if (!shape_.h_int || group.count > k_.int_limit) return;
    const auto n = static_cast<int32_t>(run.end - run.begin);
    for (int64_t i = 0; i < group.count; i++) {
        const int64_t slot = group.slots[i];
        const bool last = __atomic_fetch_sub(ws_.tiles_left + slot, n, __ATOMIC_ACQ_REL) == n;
        if (last) k_.quantize_row(shape_.intermediate_padded, ws_.h_int.rows + slot);
    }
}

void Layer::finish_hidden_tile(const Group& group, int64_t tile, float* acc) {
    for (int64_t i = 0; a_.weight_on_input && i < group.count; i++) {
        const float weight = a_.topk_weights[group.slots[i]];
        for (int c = 0; c < kTileRows; c++) acc[i * kTileRows + c] *= weight;
    }
    const int64_t columns = shape_.h_per_tile, first = tile * columns;
    const int64_t bias_row = group.expert * shape_.w13_bias_width;
    add_bias(a_.w13_bias, bias_row + first, columns, acc, group.count);
    if (shape_.gated) {
        add_bias(a_.w13_bias, bias_row + shape_.intermediate_padded + first, columns, acc + columns, group.count);
    }
    k_.activate(a_.activation, acc, group.count);
    const bool round = a_.dtype != Dtype::f32 && shape_.h_storage == Dtype::f32;
    const float tiny = shape_.tiny(shape_.h_storage);
    for (int64_t i = 0; i < group.count; i++) {
        float* values = acc + i * kTileRows;
        uint16_t rounded[kTileRows];
        if (round) k_.from_float(values, Dtype::bf16, rounded, columns);
        if (round) k_.to_float(rounded, Dtype::bf16, values, columns);
        const int64_t slot = group.slots[i];
        k_.from_float(values, shape_.h_storage, ws_.h.row(slot) + first * ws_.h.item, columns);
        const int flags = k_.range(values, columns, tiny);
        if (flags != 0) __atomic_fetch_or(ws_.h.flags + slot, static_cast<uint8_t>(flags), __ATOMIC_RELAXED);
    }
}

void Layer::finish_output(const Group& group, const TileRange& run, float* acc) {
    for (int64_t t = run.begin; t < run.end; t++, acc += group.count * kTileRows) {
        const int64_t first = t * kTileRows;
        add_bias(a_.w2_bias, group.expert * shape_.hidden_padded + first, kTileRows, acc, group.count);
        for (int64_t i = 0; i < group.count; i++) {
            memcpy(ws_.y + group.slots[i] * a_.hidden + first, acc + i * kTileRows, kTileRows * sizeof(float));
        }
    }
}

void Layer::combine() {
    const int64_t item = dtype_bytes(a_.dtype);
    parallel_tasks(threads_, a_.tokens, a_.tokens * a_.top_k * a_.hidden, [&](int64_t, int64_t t) {
        char* out = static_cast<char*>(a_.out) + t * a_.hidden * item;
        float sum[kColumns];
        for (int64_t c = 0; c < a_.hidden; c += kColumns) {
            const int64_t n = std::min(kColumns, a_.hidden - c);
            std::fill_n(sum, n, 0.0f);
            for (int64_t slot = t * a_.top_k; slot < (t + 1) * a_.top_k; slot++) {
                if (a_.topk_ids[slot] == kSkip) continue;
                const float weight = a_.weight_on_input ? 1.0f : a_.topk_weights[slot];
                k_.accumulate(sum, ws_.y + slot * a_.hidden + c, weight, n);
            }
            k_.from_float(sum, a_.dtype, out + c * item, n);
        }
    });
}

}  // namespace

int64_t moe_workspace_bytes(const Kernels& kernels, const MoeArgs& args, int64_t threads) {
    return Workspace(Shape(kernels, args), threads, nullptr).bytes();
}

void moe(const Kernels& kernels, const MoeArgs& args, void* workspace, const Threads& threads) {
    MX_CHECK(args.hidden % kBlock == 0 && args.intermediate % kBlock == 0, "hidden and intermediate must be blocks");
    MX_CHECK(threads.count >= 1, "needs a thread");
    if (args.tokens == 0) return;
    Layer(kernels, args, workspace, threads).run();
}

}  // namespace mxfp4::cpu
