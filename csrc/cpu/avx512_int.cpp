// The AVX512-VNNI table: AVX-512, and products of rows in integers; see IntRow in kernels.h.
//
// A line holds 16 rows of weights x 8 k. Two byte shuffles make them 2 w + 12 (0 .. 24), and vpdpbusd adds the products
// of four k of a row and four elements of a plane of x, taken from memory by broadcast, to an int32 of that row: 64
// products an instruction where FMA has 16, and two or three planes in place of one fp32 row. Everything is exact up to
// the fp32 sum of a block of 32 k: the joined planes stay below 2^24 after the offset is in.
//
// Steps, 2026-11-30, a core of an Intel Xeon with AVX512-VNNI, -BF16 and AMX (Sapphire Rapids), weights in L2, GFLOP/s
// for one row and for eight, two planes / three (`python benchmarks/kernels.py`); the fp32 kernels have 50 and 113:
//
//   expected                                          found
//   1.5 times fp32: 20 instructions of decoding, and  91 / 80, 149 / 117: GCC 12 broadcasts x by an instruction apart
//   16 + 5 a row of x (24 + 7), where fp32 takes 32
//   a third less instructions: x broadcast within     94 / 88, 161 / 136
//   vpdpbusd, by assembler; row pointers kept;
//   prefetches for any number of rows
//
// The layer with it after the fp32 kernels (32 experts of 2880 x 2880, top 4, 2 threads, torch in turn), times the
// better torch loop: one token 5.8 after 4.8, 16 tokens 4.9 after 3.4, 64 tokens 3.2 after 2.1, 256 tokens 2.2
// after 1.8.
#include <immintrin.h>

#include "avx2_int.h"
#include "avx512_dot.h"
#include "avx512_vector.h"
#include "kernels.h"

namespace mxfp4::cpu {
namespace {

constexpr int kTwoPlaneRows = 8, kThreePlaneRows = 6;  // rows of x at once: their sums and totals fill the registers
constexpr int kBothHalves = 6;                         // up to this many sums, both halves of a tile fit as well

// 2 w + 12 of each code, in every 128-bit lane.
inline __m512i weight_table() {
    return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

// sum += products with the same four elements in every row. In assembler, since GCC 12 broadcasts by an instruction
// apart.
inline __m512i add_products(__m512i sum, __m512i weights, const int8_t* x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const int8_t (*)[4]>(x)));
    return sum;
}

// 32 k of 16 rows of the tile: total[i] += scale * factor * (weights * q).
template <int planes, int m>
inline void add_block(const uint8_t* super, int kb, int half, const IntBlock* const* x, __m512i table, __m512* total) {
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i sum[m][planes];
    for_each<m>([&](int i) {
        sum[i][planes - 2] = _mm512_setzero_si512();
        sum[i][planes - 1] = _mm512_set1_epi32(x[i]->offset[1]);
        if (planes == 3) sum[i][0] = _mm512_set1_epi32(x[i]->offset[0]);
    });
    for_each<kBlock / kStepK>([&](int step) {
        const __m512i codes = load_line(super, kb * (kBlock / kStepK) + step, half);
        const __m512i even = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, mask));
        const __m512i odd = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask));
        for_each<m * planes>([&](int n) {
            __m512i& s = sum[n / planes][n % planes];
            const int8_t* bytes = x[n / planes]->planes[n % planes] + step * kStepK;
            s = add_products(s, even, bytes);
            s = add_products(s, odd, bytes + 4);
        });
    });
    const __m512 scale = scales_of(super, kb, half);
    for_each<m>([&](int i) {
        const __m512i low = _mm512_add_epi32(_mm512_slli_epi32(sum[i][planes - 2], 8), sum[i][planes - 1]);
        __m512 all = _mm512_cvtepi32_ps(low);
        if (planes == 3) all = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i][0]), _mm512_set1_ps(65536.0f), all);
        total[i] = _mm512_fmadd_ps(_mm512_mul_ps(all, _mm512_set1_ps(x[i]->factor)), scale, total[i]);
    });
}

// Column k of half a tile times the value that the planes lack.
inline __m512 add_residual(const uint8_t* tile, bool overflows, int half, Residual residual, __m512 total) {
    const int k = residual.k % kSuperK, in_step = k % kStepK;
    const uint8_t* super = tile + residual.k / kSuperK * kSuperBytes;
    if (overflows && has_scale_outside(super, 0, kOverflowByte - 1)) return total;  // added as a whole
    const __m512 elements = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                           -2.0f, -3.0f, -4.0f, -6.0f);
    const __m128i shift = _mm_cvtsi32_si128(in_step % 2 * 16 + in_step / 2 * 4);
    const __m512i codes = _mm512_srl_epi32(load_line(super, k / kStepK, half), shift);
    const __m512 weight = _mm512_mul_ps(_mm512_permutexvar_ps(codes, elements), scales_of(super, k / kBlock, half));
    return _mm512_fmadd_ps(weight, _mm512_set1_ps(residual.value), total);
}

// A superblock of which a scale leaves fp32 with some codes, from the fp32 values of the rows.
template <int m>
void add_overflowing(const uint8_t* super, int64_t s, const IntProduct& p, int64_t first, int64_t tile) {
    const float* values[m];
    alignas(64) float sums[m][kTileRows] = {};
    for (int i = 0; i < m; i++) values[i] = p.rows[first + i]->values + s * kSuperK;
    avx512_many(super, 1, values, m, p.panel, &sums[0][0]);
    for (int i = 0; i < m; i++) {
        float* acc = p.acc[first + i] + tile * p.stride;
        for (int r = 0; r < kTileRows; r++) acc[r] += sums[i][r];
    }
}

// Rows first .. first + m - 1 with `halves` halves of a tile, from half `begin` on.
template <int planes, int m, int halves>
void add_halves(const IntProduct& p, int64_t first, int64_t t, int begin) {
    const uint8_t* tile = p.tiles + t * p.supers * kSuperBytes;
    const __m512i table = weight_table();
    __m512 total[halves][m];
    for_each<halves * m>([&](int n) { total[n / m][n % m] = _mm512_setzero_ps(); });
    const IntBlock* x[m];
    for_each<m>([&](int i) { x[i] = p.rows[first + i]->blocks; });
    const bool from_memory = first == 0 && begin == 0;
    bool overflows = false;
    for (int64_t s = 0; s < p.supers; s++) {
        const uint8_t* super = tile + s * kSuperBytes;
        if (from_memory) prefetch_ahead(super);
        if (has_scale_outside(super, 0, kOverflowByte - 1)) {
            overflows = true;
            if (begin == 0) add_overflowing<m>(super, s, p, first, t);
            for_each<m>([&](int i) { x[i] += 2; });
            continue;
        }
#pragma GCC unroll 1
        for (int kb = 0; kb < 2; kb++) {
            for_each<halves>([&](int h) { add_block<planes, m>(super, kb, begin + h, x, table, total[h]); });
            for_each<m>([&](int i) { x[i]++; });
        }
    }
    for_each<halves>([&](int h) {
        for_each<m>([&](int i) {
            const IntRow& row = *p.rows[first + i];
            __m512 all = total[h][i];
            for (int64_t r = 0; r < row.residual_count; r++) {
                all = add_residual(tile, overflows, begin + h, row.residuals[r], all);
            }
            float* out = p.acc[first + i] + t * p.stride + (begin + h) * kHalfRows;
            _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), all));
        });
    });
}

template <int planes, int m>
void add_rows(const IntProduct& p, int64_t first, int64_t t) {
    if (planes * m <= kBothHalves) return add_halves<planes, m, planes * m <= kBothHalves ? 2 : 1>(p, first, t, 0);
    add_halves<planes, m, 1>(p, first, t, 0);
    add_halves<planes, m, 1>(p, first, t, 1);
}

using AddRows = void (*)(const IntProduct&, int64_t, int64_t);
constexpr AddRows kTwoPlanes[kTwoPlaneRows] = {add_rows<2, 1>, add_rows<2, 2>, add_rows<2, 3>, add_rows<2, 4>,
                                               add_rows<2, 5>, add_rows<2, 6>, add_rows<2, 7>, add_rows<2, 8>};
constexpr AddRows kThreePlanes[kThreePlaneRows] = {add_rows<3, 1>, add_rows<3, 2>, add_rows<3, 3>,
                                                   add_rows<3, 4>, add_rows<3, 5>, add_rows<3, 6>};

// Tile by tile, so that it comes from L2 for all but the first rows; rows in blocks of even size.
void dot_int(const IntProduct& p) {
    const bool two = p.rows[0]->planes == 2;
    const int64_t most = two ? kTwoPlaneRows : kThreePlaneRows;
    for (int64_t t = 0; t < p.count; t++) {
        int64_t i = 0;
        for (int64_t blocks = (p.m + most - 1) / most; blocks > 0; blocks--) {
            const int64_t n = (p.m - i + blocks - 1) / blocks;
            (two ? kTwoPlanes : kThreePlanes)[n - 1](p, i, t);
            i += n;
        }
    }
}

}  // namespace

const Kernels& avx512_vnni_kernels() {
    static const Kernels table = [] {
        Kernels k = avx512_kernels();
        k.name = "avx512_vnni";
        k.quantize_row = avx2_quantize_row;
        k.dot_int = dot_int;
        k.int_limit = 48;  // more rows: `many` is as fast, and needs no rows in integers
        return k;
    }();
    return table;
}

}  // namespace mxfp4::cpu
