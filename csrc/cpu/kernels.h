// The seam between code that knows an instruction set and code that does not.
//
// One table per ISA. The scalar table fills every entry that is not optional and is the specification; each ISA starts
// from a copy of the table below it and replaces what it does better. No kernel here allocates, throws or knows torch.
#pragma once

#include <stdint.h>

#include "../format.h"
#include "tile.h"

namespace mxfp4::cpu {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3 };

constexpr int64_t dtype_bytes(Dtype dtype) {
    return dtype == Dtype::f32 ? 4 : dtype == Dtype::f64 ? 8 : 2;
}

// Values are part of the op schema.
enum class Activation : int {
    silu = 0,
    swigluoai = 1,
    swiglustep = 2,
    situ = 3,
    gelu = 4,
    gelu_tanh = 5,
    relu2_no_mul = 6,
    silu_no_mul = 7,
    gelu_no_mul = 8,
    gelu_tanh_no_mul = 9,
};

constexpr bool is_gated(Activation activation) {
    return activation < Activation::relu2_no_mul;
}

struct ActivationParams {
    Activation activation;
    float alpha;
    float beta;
    float limit;  // +inf means none
};

constexpr int kMaxRows = 192;                                 // rows of x one kernel call may get
constexpr int64_t kPanelBytes = 8 * kSuperK * kTileRows * 4;  // scratch of the decode-once kernels: 512 k in fp32

// What range() found in a row.
enum RangeFlags : int { kHasTiny = 1, kHasHuge = 2 };
constexpr float kHuge = 0x1p100f;      // above it, a sum over 32 unscaled elements may overflow
constexpr float kTinyBf16 = 0x1p-62f;  // below it, products may fall into the subnormals that vdpbf16ps flushes

// Multiplies a tile, or some superblocks of one, with m rows of x: acc[i * 32 + r] += sum over k of weight(r, k) *
// rows[i][k], in fp32.
//   tile [supers * 1088] packed weights; rows m pointers to supers * 64 values; 1 <= m <= kMaxRows;
//   panel kPanelBytes of 64-byte aligned scratch; acc [m, 32] is added to.
// The weights count as what dequant makes of them in fp32: codes that overflow under scale bytes 253 and 254 are Inf.
using TileDot = void (*)(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, void* panel,
                         float* acc);
// The same for rows of bf16; false, with nothing written, when these weights need the fp32 kernel to be exact.
using TileDotBf16 = bool (*)(const uint8_t* tile, int64_t supers, const uint16_t* const* rows, int64_t m, void* panel,
                             float* acc);

// A row of x in integers, without loss. An element of a block of 32 is an integer q times a power of two that all 32
// share; q = planes[0] * 256 + planes[1] with two planes of int8, planes[0] * 65536 + planes[1] * 256 + planes[2] with
// three. Elements that are no such integer are 0 in the planes and enter as residuals.
constexpr int kPlanes = 3;
constexpr int kResidualShare = 16;  // a row has at most padded_k / 16 residuals

struct IntBlock {
    float factor;                    // of q, halved, because products take doubled weights
    int32_t offset[2];               // -12 * sum of the top plane of three, and of the two others joined
    int8_t planes[kPlanes][kBlock];  // every 8 k in the order of kIntOrder
};

struct Residual {
    int32_t k;
    float value;
};

struct IntRow {
    const float* values;  // all of the row in fp32
    IntBlock* blocks;     // [padded_k / 32]
    Residual* residuals;  // [padded_k / kResidualShare]
    int64_t residual_count;
    int planes;  // 2 or 3; 0: the row needs an fp32 kernel
};

// Fills all but the pointers from row->values.
using QuantizeRow = void (*)(int64_t padded_k, IntRow* row);
// Rows in integers and the tiles that they meet.
struct IntProduct {
    const uint8_t* tiles;  // `count` tiles that follow each other
    int64_t count, supers;
    const IntRow* const* rows;  // m rows with the same number of planes, which is not 0
    int64_t m;
    void* panel;        // as of TileDot
    float* const* acc;  // acc[i] + t * stride: the 32 sums of row i and tile t, which are added to
    int64_t stride;
};
// As TileDot. A row has the same bits whatever the other rows and tiles are.
using DotInt = void (*)(const IntProduct& product);

struct Kernels {
    const char* name;

    // Conversions; rounding is to nearest even, NaN stays NaN. from_float does not write f64.
    void (*to_float)(const void* src, Dtype dtype, float* dst, int64_t n);
    void (*from_float)(const float* src, Dtype dtype, void* dst, int64_t n);

    // The number format. n % 32 == 0; blocks [n/2], scales [n/32].
    void (*quant)(const float* x, int64_t n, ScaleRule rule, uint8_t* blocks, uint8_t* scales);
    void (*dequant)(const uint8_t* blocks, const uint8_t* scales, int64_t n, float* out);

    // Matrix products. `few` may scale sums instead of weights, so it takes no rows with kHasHuge; below few_limit
    // rows it is the faster one. `many` takes everything, and gives a row the same bits whatever the other rows are.
    TileDot few;
    TileDot many;
    int64_t few_limit;
    TileDotBf16 few_bf16;   // null where the ISA has no bf16 dot product; takes no rows with range flags
    TileDotBf16 many_bf16;  // null together with few_bf16
    int64_t few_limit_bf16;
    // For rows of values that are bf16, up to int_limit rows of an expert; null where the ISA gains nothing from it.
    QuantizeRow quantize_row;
    DotInt dot_int;
    int64_t int_limit;

    // Element-wise parts of the layer.
    // range: flags of finite values with 0 < |x| < tiny or |x| > kHuge.
    int (*range)(const float* x, int64_t n, float tiny);
    // tile [m, 32] in place: gated, columns 0..15 (gate) and 16..31 (up) become the result in columns 0..15.
    void (*activate)(const ActivationParams& params, float* tile, int64_t m);
    // acc += w * y
    void (*accumulate)(float* acc, const float* y, float w, int64_t n);
};

const Kernels& scalar_kernels();
#if defined(MXFP4_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_vnni_kernels();
const Kernels& avx512_bf16_kernels();
#endif

}  // namespace mxfp4::cpu
