// Product of one row with a tile in integers for AVX2; see IntRow in kernels.h.
//
// At one row the fp32 register kernel is bound by its 28 instructions per 64 weights. Here a byte shuffle makes 32
// weights 2 w + 12 (0 .. 24) of a nibble, and maddubs multiplies them with 32 elements of one plane of x, of which each
// row takes the same four: a 32-bit broadcast. Everything is exact up to the fp32 sum of a block of 32 k:
//
//   int16   2 * 2 * 2 products of at most 24 * 128 = 24576 in two steps of 8 k
//   int32   offset + sum of these; below 2^24 also after joining the two low planes, so exact in fp32
//   fp32    (sum * factor of x) * scale of the weights; no product leaves the range of fp32 unless the result does
//
// Residuals are multiplied afterwards in fp32, column by column, each with all tiles of the run.
//
// Steps, 2026-11-30, one core of an EPYC of family 25 model 1 (Zen 3, 3.2 GHz), 32 x 2880 tiles in L2, packed GB/s with
// two planes (normal x, 27 residuals) and three (x as after swiglu, 4 residuals); the fp32 kernel has 10.2:
//
//   predicted             change                                         two     three
//   18 of 19 instructions groups of 16 rows share broadcasts             13.6    10.0, dropped
//   the same              groups of 8 rows                               15.6    12.4
//   fewer loads           groups of 32 rows                              16.9    -, dropped: sums on the stack
//   4 instructions less   planes joined by madd, byte 0 apart            16.2    13.1
//   latency hidden        scales applied once per superblock             18.3    14.7
//   24 to 5 us a row      planes packed by vectors, not byte by byte     2.1 us and 5.2 us for a row of 2880
//   less waiting          prefetches spread, 6 superblocks ahead         layer 2.49 ms after 2.63, medians in turn
//   more lines in flight  two tiles side by side                         layer 2.63 ms after 2.94, medians in turn
//   4 of 19 instructions  maddubs takes x from memory, where it is       19.8    15.3 (54.9 and 71 ns a superblock
//                         spread once for two tiles                      after 61.4 and 79)
//   set up once           each residual with all tiles of a run          20.4    15.4, layer 2 to 3 % less, in turn
//
// The layer (32 experts of 2880 x 2880, top 4, one token, DRAM, two threads, all in turn, median and best): 2.49 and
// 2.00 ms after 3.38 and 2.89 with the fp32 kernel; only reading the weights 1.91 and 1.56. Prefetching 4 to 32
// superblocks ahead is within 5 % of this, every second line costs 0.3 ms, no prefetch 0.4 ms. With two tiles side by
// side, distance and level stop to matter; four tiles cost 0.3 ms, eight 1.2 ms. The layer is bound by instructions
// (2.1 ms where every tile is the same one in L2, 1.7 ms for only reading): 14 for the vector pipes per 64 weights and
// two planes, which a loop of nothing else does in 4.4 cycles, and this one in 5.2.
#include "avx2_int.h"

#include <immintrin.h>
#include <string.h>

#include "avx2_dot.h"
#include "avx2_vector.h"
#include "int_row.h"

namespace mxfp4::cpu {
namespace {

constexpr int kGroups = kTileRows / kGroupRows;

// 2 w + 12 of each code, for both 128-bit lanes.
struct WeightTable {
    alignas(32) uint8_t bytes[32];
};

constexpr WeightTable weight_table() {
    constexpr int kDoubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    WeightTable table{};
    for (int i = 0; i < 32; i++) table.bytes[i] = static_cast<uint8_t>(12 + (i & 8 ? -1 : 1) * kDoubled[i & 7]);
    return table;
}

constexpr WeightTable kWeights = weight_table();

inline __m256i broadcast_dword(const int8_t* bytes) {
    int32_t dword;
    memcpy(&dword, bytes, sizeof dword);
    return _mm256_set1_epi32(dword);
}

// A nibble of each byte of 8 rows x 8 k, as 2 w + 12.
inline __m256i weights_of(__m256i codes) {
    return _mm256_shuffle_epi8(load(kWeights.bytes), _mm256_and_si256(codes, _mm256_set1_epi8(15)));
}

// The planes of a superblock in the form that maddubs takes: four elements of a plane in every 32-bit lane. The form is
// kept in memory, because as operands from there they need neither registers nor instructions of their own.
template <int planes>
struct Spread {
    __m256i part[2][kBlock / kStepK][planes][2];  // [block][step][plane][low or high nibbles]
};

template <int planes>
inline void spread(const IntBlock* x, Spread<planes>* out) {
#pragma GCC unroll 1
    for (int kb = 0; kb < 2; kb++) {
        for_each<kBlock / kStepK>([&](int step) {
            for_each<planes>([&](int p) {
                const int8_t* bytes = x[kb].planes[p] + step * kStepK;
                out->part[kb][step][p][0] = broadcast_dword(bytes);
                out->part[kb][step][p][1] = broadcast_dword(bytes + 4);
            });
        });
    }
    asm("" ::: "memory");
}

// In assembler, since GCC would load x once for all groups, and then spill it.
inline __m256i maddubs(__m256i weights, const __m256i& x) {
    __m256i sums;
    asm("vpmaddubsw %2, %1, %0" : "=x"(sums) : "x"(weights), "m"(x));
    return sums;
}

// Sums of 32 k and 8 rows: joined planes, and the top plane of three apart.
struct BlockSums {
    __m256i low, top;
};

// Weights of 8 rows times q, doubled. The factor 256 of a plane comes with the sums of pairs.
template <int planes>
inline void sum_block(const uint8_t* line, const IntBlock& x, const __m256i (*spread)[planes][2], BlockSums* out) {
    __m256i top = _mm256_setzero_si256(), low = _mm256_set1_epi32(x.offset[1]);
    for_each<2>([&](int pair) {
        __m256i words[planes];  // of 16 k
        for_each<2>([&](int half) {
            const int step = pair * 2 + half;
            __m256i codes = load(line + step * kStepBytes);
            asm("" : "+x"(codes));  // else it is loaded twice
            const __m256i even = weights_of(codes), odd = weights_of(_mm256_srli_epi16(codes, 4));
            for_each<planes>([&](int p) {
                const __m256i part =
                    _mm256_add_epi16(maddubs(even, spread[step][p][0]), maddubs(odd, spread[step][p][1]));
                words[p] = half == 0 ? part : _mm256_add_epi16(words[p], part);
            });
        });
        const auto sum = [&](int p, short weight) { return _mm256_madd_epi16(words[p], _mm256_set1_epi16(weight)); };
        low = _mm256_add_epi32(low, _mm256_add_epi32(sum(planes - 2, 256), sum(planes - 1, 1)));
        if (planes == 3) top = pair == 0 ? sum(0, 1) : _mm256_add_epi32(top, sum(0, 1));
    });
    _mm256_store_si256(&out->low, low);
    if (planes == 3) _mm256_store_si256(&out->top, _mm256_add_epi32(top, _mm256_set1_epi32(x.offset[0])));
}

enum class Scales { normal, with_zero, overflow };

// What the scale bytes of a superblock hold: byte 0 (a subnormal), or some from kOverflowByte on.
inline Scales scales_in(const uint8_t* super) {
    if (weights_may_overflow(super)) return Scales::overflow;
    const __m256i smallest = _mm256_min_epu8(load(super), load(super + 32));
    const __m256i is_zero = _mm256_cmpeq_epi8(smallest, _mm256_setzero_si256());
    return _mm256_testz_si256(is_zero, is_zero) ? Scales::normal : Scales::with_zero;
}

inline __m256 normal_scales_of(const uint8_t* bytes) {
    const __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(b, 23));
}

// Brings an eighth of the superblock that is needed 6.5 KB later, as prefetch_ahead does for whole ones: spread over
// the work, requests do not wait for each other. Part 0 takes the line of scales, too.
inline void prefetch_part(const uint8_t* super, int part) {
    const auto* ahead = reinterpret_cast<const char*>(super) + 6 * kSuperBytes;
    if (part == 0) _mm_prefetch(ahead, _MM_HINT_T0);
    _mm_prefetch(ahead + kScaleBytes + part * 2 * kLineBytes, _MM_HINT_T0);
    _mm_prefetch(ahead + kScaleBytes + part * 2 * kLineBytes + kLineBytes, _MM_HINT_T0);
}

// Scales are applied in a loop of their own: at the end of every block, the latency of that chain was not hidden.
template <int planes, bool normal>
inline void add_super(const uint8_t* super, const IntBlock* x, const Spread<planes>& spread, __m256* total) {
    BlockSums sums[2][kGroups];
#pragma GCC unroll 1
    for (int kb = 0; kb < 2; kb++) {
#pragma GCC unroll 1
        for (int g = 0; g < kGroups; g++) {
            prefetch_part(super, kb * kGroups + g);
            sum_block<planes>(line_of(super, kb * 4, 0) + g * 32, x[kb], spread.part[kb], &sums[kb][g]);
        }
    }
    asm("" ::: "memory");
    for_each<2 * kGroups>([&](int i) {
        const int kb = i / kGroups, g = i % kGroups;
        const uint8_t* bytes = scale_of(super, kb, g * kGroupRows);
        __m256 sum = _mm256_cvtepi32_ps(sums[kb][g].low);
        if (planes == 3) {
            sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[kb][g].top), _mm256_set1_ps(65536.0f), sum);
        }
        sum = _mm256_mul_ps(sum, _mm256_set1_ps(x[kb].factor));
        total[g] = _mm256_fmadd_ps(sum, normal ? normal_scales_of(bytes) : finite_scales_of(bytes), total[g]);
    });
}

// The values that the planes lack, times their columns of all tiles of the run.
void add_residuals(const IntProduct& p, int64_t i, bool overflows) {
    const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const IntRow& row = *p.rows[i];
    for (int64_t r = 0; r < row.residual_count; r++) {
        const int64_t residual_k = row.residuals[r].k;
        const int k = static_cast<int>(residual_k % kSuperK), in_step = k % kStepK;
        const __m128i shift = _mm_cvtsi32_si128(in_step % 2 * 16 + in_step / 2 * 4);
        const __m256 products = _mm256_mul_ps(magnitudes, _mm256_set1_ps(row.residuals[r].value));
        const uint8_t* super = p.tiles + residual_k / kSuperK * kSuperBytes;
        float* acc = p.acc[i];
        for (int64_t t = 0; t < p.count; t++, super += p.supers * kSuperBytes, acc += p.stride) {
            if (overflows && weights_may_overflow(super)) continue;  // added as a whole
            const uint8_t* line = line_of(super, k / kStepK, 0);
            for_each<kGroups>([&](int g) {
                const __m256i codes = _mm256_srl_epi32(load(line + g * 32), shift);
                const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(codes, 3), 31);
                const __m256 product =
                    _mm256_xor_ps(_mm256_permutevar8x32_ps(products, codes), _mm256_castsi256_ps(sign));
                const __m256 scale = finite_scales_of(scale_of(super, k / kBlock, g * kGroupRows));
                float* out = acc + g * kGroupRows;
                _mm256_storeu_ps(out, _mm256_fmadd_ps(product, scale, _mm256_loadu_ps(out)));
            });
        }
    }
}

// A row with tile `first`, or also with the one `apart` tiles behind it, side by side: memory serves two addresses at
// once faster than one.
template <int planes, int streams>
void dot(const IntProduct& p, int64_t i, int64_t first, int64_t apart, bool* overflows) {
    const IntRow& row = *p.rows[i];
    const auto tile_of = [&](int t) { return p.tiles + (first + t * apart) * p.supers * kSuperBytes; };
    const auto acc_of = [&](int t) { return p.acc[i] + (first + t * apart) * p.stride; };
    __m256 total[streams][kGroups];
    for_each<streams * kGroups>([&](int n) { total[n / kGroups][n % kGroups] = _mm256_setzero_ps(); });
    for (int64_t s = 0; s < p.supers; s++) {
        const float* values = row.values + s * kSuperK;
        Spread<planes> x;
        spread<planes>(row.blocks + s * 2, &x);
#pragma GCC unroll 1
        for (int t = 0; t < streams; t++) {
            const uint8_t* super = tile_of(t) + s * kSuperBytes;
            const Scales scales = scales_in(super);
            if (scales == Scales::normal) add_super<planes, true>(super, row.blocks + s * 2, x, total[t]);
            if (scales == Scales::with_zero) add_super<planes, false>(super, row.blocks + s * 2, x, total[t]);
            if (scales == Scales::overflow) {
                *overflows = true;
                avx2_many(super, 1, &values, 1, p.panel, acc_of(t));
            }
        }
    }
    for (int t = 0; t < streams; t++) {
        for_each<kGroups>([&](int g) {
            float* out = acc_of(t) + g * kGroupRows;
            _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), total[t][g]));
        });
    }
}

// Two streams go through the two halves of the run, so that what they prefetch is what they need next.
template <int planes>
void dot_run(const IntProduct& p) {
    const int64_t half = p.count / 2;
    for (int64_t i = 0; i < p.m; i++) {
        bool overflows = false;
        for (int64_t t = 0; t < half; t++) dot<planes, 2>(p, i, t, half, &overflows);
        if (p.count % 2 != 0) dot<planes, 1>(p, i, p.count - 1, 0, &overflows);
        add_residuals(p, i, overflows);
    }
}

inline int32_t sum_of_lanes(__m256i v) {
    const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i quarter = _mm_add_epi32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(quarter) + _mm_extract_epi32(quarter, 1);
}

struct PackVector {
    template <int planes>
    static void pack(const int32_t* integers, IntBlock* block) {
        const __m256i lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works per 128-bit lane
        const __m256i order = _mm256_set1_epi64x(0x0703060205010400);     // kIntOrder, in both groups of a lane
        const __m256i second = _mm256_set_epi64x(0x0808080808080808, 0, 0x0808080808080808, 0);
        __m256i q[4], sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for_each<4>([&](int i) { q[i] = load(reinterpret_cast<const uint8_t*>(integers + i * 8)); });
        for_each<planes>([&](int i) {
            const int p = planes - 1 - i;
            __m256i byte[4];
            for_each<4>([&](int j) {
                byte[j] = _mm256_srai_epi32(_mm256_slli_epi32(q[j], 24), 24);
                q[j] = _mm256_srai_epi32(_mm256_sub_epi32(q[j], byte[j]), 8);
            });
            const __m256i words01 = _mm256_packs_epi32(byte[0], byte[1]),
                          words23 = _mm256_packs_epi32(byte[2], byte[3]);
            const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words01, words23), lanes);
            const __m256i ordered = _mm256_shuffle_epi8(bytes, _mm256_add_epi8(order, second));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(block->planes[p]), ordered);
            const __m256i all =
                _mm256_add_epi32(_mm256_add_epi32(byte[0], byte[1]), _mm256_add_epi32(byte[2], byte[3]));
            __m256i& total = sum[offset_of(planes, p)];
            total = _mm256_add_epi32(total, _mm256_mullo_epi32(all, _mm256_set1_epi32(offset_factor(planes, p))));
        });
        for (int i = 0; i < 2; i++) block->offset[i] = sum_of_lanes(sum[i]);
    }
};

}  // namespace

void avx2_quantize_row(int64_t padded_k, IntRow* row) {
    split<PackVector>(padded_k, row);
}

void avx2_dot_int(const IntProduct& product) {
    if (product.rows[0]->planes == 2) return dot_run<2>(product);
    dot_run<3>(product);
}

}  // namespace mxfp4::cpu
