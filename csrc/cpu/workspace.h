// Sizes of one call of the layer and the memory it works in.
#pragma once

#include <float.h>
#include <stdint.h>

#include "moe.h"

namespace mxfp4::cpu {

constexpr int64_t kLongestRun = 8;  // tiles of one task; their sums stay in L2 together
constexpr int kExpandedRows = 6;    // rows that are brought from bf16 to fp32 at once; a row block of the kernels

// Which kernels a row of x or h may take.
enum class Path : int {
    any = 0,             // all of them
    fp32 = 1,            // no bf16 dot product: it would flush small values
    weights_scaled = 2,  // only kernels that scale weights: sums of unscaled products overflow or lose bits
};
constexpr int kPaths = 3;

struct Shape {
    Shape(const Kernels& kernels, const MoeArgs& args)
        : tokens(args.tokens),
          slots(args.tokens * args.top_k),
          hidden(args.hidden),
          fp32_values(args.dtype == Dtype::f32) {
        const auto pad = [](int64_t n) { return (n + kSuperK - 1) / kSuperK * kSuperK; };
        gated = is_gated(args.activation.activation);
        hidden_padded = pad(args.hidden);
        intermediate_padded = pad(args.intermediate);
        h_per_tile = gated ? kTileRows / 2 : kTileRows;
        w13_tiles = args.intermediate / h_per_tile;
        w13_tiles_packed = intermediate_padded / h_per_tile;
        w13_bias_width = intermediate_padded * (gated ? 2 : 1);
        w2_tiles = args.hidden / kTileRows;
        w2_tiles_packed = hidden_padded / kTileRows;
        const bool has_bf16 = kernels.few_bf16 != nullptr;
        x_storage = has_bf16 && args.dtype == Dtype::bf16 ? Dtype::bf16 : Dtype::f32;
        h_storage = has_bf16 && args.dtype != Dtype::f32 ? Dtype::bf16 : Dtype::f32;
        // Only a few rows of an expert take integers, and only bf16 values can.
        const bool few_rows = slots <= 2 * kernels.int_limit * args.experts && !args.batch_invariant;
        const bool has_int = kernels.dot_int != nullptr && !has_bf16 && few_rows;
        x_int = has_int && args.dtype == Dtype::bf16;
        h_int = has_int && args.dtype != Dtype::f32;
    }

    // Below it, a nonzero value needs care. Values of 16-bit types are multiples of 2^-133, so that products with codes
    // and their sums are exact at the low end of fp32: no care. fp32 subnormals times 0.5 may lose a bit.
    float tiny(Dtype storage) const { return storage == Dtype::bf16 ? kTinyBf16 : fp32_values ? FLT_MIN : 0.0f; }

    Path path(Dtype storage, int flags) const {
        if (flags == 0) return Path::any;
        return flags == kHasTiny && storage == Dtype::bf16 ? Path::fp32 : Path::weights_scaled;
    }

    int64_t tokens, slots, hidden;
    bool fp32_values, gated;
    int64_t hidden_padded, intermediate_padded;
    int64_t h_per_tile;  // columns of h that one tile of w13 makes
    int64_t w13_tiles, w13_tiles_packed, w13_bias_width;
    int64_t w2_tiles, w2_tiles_packed;
    Dtype x_storage, h_storage;  // bf16 where kernels read it, else f32
    bool x_int, h_int;           // whether rows are also kept in integers
};

// Rows of x or h as kernels read them.
struct Rows {
    char* data;
    uint8_t* flags;  // RangeFlags of each row
    Dtype storage;
    int64_t item, stride;  // bytes

    char* row(int64_t i) const { return data + i * stride; }
};

// The same rows in integers; null where there are none.
struct IntRows {
    IntRow* rows;
    IntBlock* blocks;
    Residual* residuals;
    int64_t padded_k;

    // Everything but the integers.
    IntRow* init(int64_t i, const Rows& values) const {
        rows[i] = {reinterpret_cast<const float*>(values.row(i)), blocks + i * (padded_k / kBlock),
                   residuals + i * (padded_k / kResidualShare), 0, 0};
        return rows + i;
    }
};

struct ThreadScratch {
    float* acc;       // [kLongestRun, kMaxRows, 32]
    void* panel;      // kPanelBytes
    float* expanded;  // [kExpandedRows, padded width], only where rows are bf16
};

class Workspace {
  public:
    // base = null only measures.
    Workspace(const Shape& shape, int64_t threads, void* base) : base_(reinterpret_cast<uintptr_t>(base)) {
        x = rows(shape.tokens, shape.hidden_padded, shape.x_storage);
        h = rows(shape.slots, shape.intermediate_padded, shape.h_storage);
        x_int = int_rows(shape.x_int ? shape.tokens : 0, shape.hidden_padded);
        h_int = int_rows(shape.h_int ? shape.slots : 0, shape.intermediate_padded);
        tiles_left = take<int32_t>(shape.h_int ? shape.slots : 0);
        y = take<float>(shape.slots * shape.hidden);
        order = take<int64_t>(shape.slots);
        const int64_t width =
            shape.hidden_padded > shape.intermediate_padded ? shape.hidden_padded : shape.intermediate_padded;
        const int64_t expanded = shape.h_storage == Dtype::bf16 ? kExpandedRows * width : 0;
        acc_ = take<float>(threads * kAcc);
        panel_ = take<char>(threads * kPanelBytes);
        expanded_ = take<float>(threads * expanded);
        expanded_size_ = expanded;
    }

    ThreadScratch scratch(int64_t thread) const {
        return {acc_ + thread * kAcc, panel_ + thread * kPanelBytes, expanded_ + thread * expanded_size_};
    }

    int64_t bytes() const { return used_ + kAlign; }

    Rows x, h;
    IntRows x_int, h_int;
    int32_t* tiles_left;  // [slots], tiles of w13 that the h of a slot still lacks
    float* y;             // [slots, hidden]
    int64_t* order;       // [slots], slots sorted by expert

  private:
    static constexpr int64_t kAlign = 64;
    static constexpr int64_t kAcc = kLongestRun * kMaxRows * kTileRows;

    template <class T>
    T* take(int64_t n) {
        const uintptr_t start = (base_ + kAlign - 1) / kAlign * kAlign + static_cast<uintptr_t>(used_);
        used_ += (n * static_cast<int64_t>(sizeof(T)) + kAlign - 1) / kAlign * kAlign;
        return reinterpret_cast<T*>(start);
    }

    // A cache line is added to every row: rows at a power of two would meet in the same L1 sets.
    Rows rows(int64_t n, int64_t width, Dtype storage) {
        const int64_t item = dtype_bytes(storage), stride = width * item + kAlign;
        char* data = take<char>(n * stride);
        return {data, take<uint8_t>(n), storage, item, stride};
    }

    IntRows int_rows(int64_t n, int64_t width) {
        if (n == 0) return {nullptr, nullptr, nullptr, width};
        IntRow* rows = take<IntRow>(n);
        IntBlock* blocks = take<IntBlock>(n * (width / kBlock));
        return {rows, blocks, take<Residual>(n * (width / kResidualShare)), width};
    }

    uintptr_t base_;
    int64_t used_ = 0;
    float* acc_;
    char* panel_;
    float* expanded_;
    int64_t expanded_size_;
};

}  // namespace mxfp4::cpu
