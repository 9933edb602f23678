// Matrix products for AVX2 + FMA, exact weights times fp32 rows.
//
// few: decodes in registers. 32 bytes are 8 rows x 8 k. The even (odd) nibbles are looked up twice by byte shuffles,
// for the high and the low byte of the bf16 pattern of each code; interleaving the two gives words, and a shift or a
// mask makes them fp32. Vectors then hold two neighbouring k of four rows,
//
//     a = r0 k, r0 k+1, r1 k, r1 k+1 | r4 k, r4 k+1, r5 k, r5 k+1        b = the same of r2, r3 | r6, r7
//
// so x enters as a 64-bit broadcast of a pair, and one horizontal add at the very end sums pairs. Sums are multiplied
// by the scale once per 32 k. 28 instructions decode and multiply 64 weights with one row.
//
// many: decodes up to 512 k of the tile into an fp32 panel, scale folded in (a power of two: exact), and runs a 6 x 16
// register block over it.
//
// Steps, 2026-11-30, one core of an EPYC of family 25 model 1 (Zen 3, 3.2 GHz), 32 x 2880 tiles in L2; GB/s are packed
// bytes, GFLOP/s what they amount to; the peak of fp32 FMA is 103:
//
//   predicted          change                                        result
//   7 cycles per 32 B  byte look-ups, word interleave (M = 1)        9.5 GB/s, 10.8 cycles
//   9 cycles           int8 look-up, shift to the top, convert       8.7 GB/s, dropped: 37 instructions for 28
//   9 cycles           four sums per output instead of two           9.4 GB/s, dropped: not bound by latency
//   10 cycles          multiply instead of shift                     10.0 GB/s
//   fewer stores       no broadcasts kept on the stack               10.2 GB/s; M = 4 71 GFLOP/s after 67
//   pages cost 10 %    prefetch 8 superblocks ahead                  layer from DRAM, 2 threads: 2.87 ms after 3.00
//   95 % of peak       panel and 6 x 16 block (M = 128)              97 GFLOP/s, 94 %; M = 12 76 GFLOP/s
#include "avx2_dot.h"

#include <immintrin.h>
#include <string.h>

#include "../format.h"
#include "avx2_vector.h"
#include "tile.h"

namespace mxfp4::cpu {
namespace {

constexpr int kPanelSupers = 8;
constexpr int kHalfRows = 16;
constexpr int kRowBlock = 6;     // rows of x in the panel kernel: 12 of 16 registers accumulate
constexpr int kFewRowBlock = 4;  // rows of x in the register kernel

// Byte `shift / 8` of the fp32 pattern of each code, for both 128-bit lanes.
struct ByteTable {
    alignas(32) uint8_t bytes[32];
};

constexpr ByteTable byte_table(int shift) {
    ByteTable table{};
    for (uint32_t i = 0; i < 32; i++) table.bytes[i] = static_cast<uint8_t>(element_bits(i & 15) >> shift);
    return table;
}

constexpr ByteTable kHighBytes = byte_table(24), kLowBytes = byte_table(16);

// x[0], x[1] in every 64-bit lane.
inline __m256 broadcast_pair(const float* x) {
    double pair;
    memcpy(&pair, x, sizeof pair);
    return _mm256_castpd_ps(_mm256_set1_pd(pair));
}

// Moves the low word of each dword up by a multiplication, hidden from the compiler, which would make it a shift: on
// Zen 3, shifts share their two ports with the byte shuffles, which are the bottleneck.
inline __m256 low_word_as_float(__m256i dwords) {
    __m256i factor = _mm256_set1_epi32(1 << 16);
    asm("" : "+x"(factor));
    return _mm256_castsi256_ps(_mm256_mullo_epi32(dwords, factor));
}

// Eight weights: two k of the rows of `a` and `b` in the picture above.
struct Pairs {
    __m256 a, b;
};

// The nibbles 0 (or 1) of eight rows, 32 weights: `first` holds k 0, 1 (or 2, 3) of the step, `second` 4, 5 (or 6, 7).
template <int nibble>
inline void decode(__m256i line, Pairs& first, Pairs& second) {
    const __m256i codes = _mm256_and_si256(nibble == 0 ? line : _mm256_srli_epi16(line, 4), _mm256_set1_epi8(15));
    const __m256i high = _mm256_shuffle_epi8(load(kHighBytes.bytes), codes);
    const __m256i low = _mm256_shuffle_epi8(load(kLowBytes.bytes), codes);
    const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
    const __m256i upper_word = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    first = {low_word_as_float(a), low_word_as_float(b)};
    second = {_mm256_castsi256_ps(_mm256_and_si256(a, upper_word)),
              _mm256_castsi256_ps(_mm256_and_si256(b, upper_word))};
}

// Scale bytes of eight rows as fp32. Doubling the byte and keeping at least 1 makes 0 the subnormal 2^-127, and adding
// 1 for 255 makes it NaN; shifted by 22 this is the fp32 pattern.
inline __m256 scales_of(const uint8_t* bytes) {
    const __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    const __m256i doubled = _mm256_max_epi32(_mm256_add_epi32(b, b), _mm256_set1_epi32(1));
    const __m256i is_nan = _mm256_cmpeq_epi32(b, _mm256_set1_epi32(kScaleNaN));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(doubled, is_nan), 22));
}

// ---------------------------------------------------------------------------------------------------------- panel

// panel [half][k][16], k = supers * 64
void decode_panel(const uint8_t* tile, int64_t supers, float* panel) {
    const int64_t half_size = supers * kSuperK * kHalfRows;
    for (int64_t block = 0; block < supers * 2; block++) {
        const uint8_t* super = tile + block / 2 * kSuperBytes;
        const int kb = static_cast<int>(block % 2);
        for (int group = 0; group < 4; group++) {
            const __m256 scale = scales_of(scale_of(super, kb, group * kGroupRows));
            float* out = panel + group / 2 * half_size + block * kBlock * kHalfRows + group % 2 * kGroupRows;
            const uint8_t* line = line_of(super, kb * 4, group / 2) + group % 2 * 32;
            const auto store = [&](int k, Pairs w) {
                const __m256 even = _mm256_shuffle_ps(w.a, w.b, _MM_SHUFFLE(2, 0, 2, 0));
                const __m256 odd = _mm256_shuffle_ps(w.a, w.b, _MM_SHUFFLE(3, 1, 3, 1));
                _mm256_storeu_ps(out + k * kHalfRows, _mm256_mul_ps(even, scale));
                _mm256_storeu_ps(out + (k + 1) * kHalfRows, _mm256_mul_ps(odd, scale));
            };
            for (int step = 0; step < 4; step++, line += kStepBytes) {
                Pairs first, second;
                decode<0>(load(line), first, second);
                store(step * kStepK, first);
                store(step * kStepK + 4, second);
                decode<1>(load(line), first, second);
                store(step * kStepK + 2, first);
                store(step * kStepK + 6, second);
            }
        }
    }
}

// acc[i * 32 + row] += panel * x for `halves` halves of the tile and `m` rows. One chain of sums per output, in the
// order of k, whatever m is.
template <int m, int halves>
void panel_block(const float* panel, int64_t half_size, int64_t k_count, const float* const* rows, int64_t k_first,
                 float* acc) {
    __m256 sum[m][halves * 2];
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) {
#pragma GCC unroll 8
        for (int c = 0; c < halves * 2; c++) sum[i][c] = _mm256_loadu_ps(acc + i * kTileRows + c * 8);
    }
    const float* x[m];
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) x[i] = rows[i] + k_first;
    for (int64_t k = 0; k < k_count; k++) {
        __m256 w[halves * 2];
#pragma GCC unroll 8
        for (int c = 0; c < halves * 2; c++) {
            w[c] = _mm256_loadu_ps(panel + c / 2 * half_size + k * kHalfRows + c % 2 * 8);
        }
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            const __m256 value = _mm256_broadcast_ss(x[i] + k);
#pragma GCC unroll 4
            for (int c = 0; c < halves * 2; c++) sum[i][c] = _mm256_fmadd_ps(w[c], value, sum[i][c]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) {
#pragma GCC unroll 8
        for (int c = 0; c < halves * 2; c++) _mm256_storeu_ps(acc + i * kTileRows + c * 8, sum[i][c]);
    }
}

template <int m>
void panel_rows(const float* panel, int64_t k_count, const float* const* rows, int64_t k_first, float* acc) {
    const int64_t half_size = k_count * kHalfRows;
    if (m <= 3) return panel_block<m, 2>(panel, half_size, k_count, rows, k_first, acc);
    panel_block<m, 1>(panel, half_size, k_count, rows, k_first, acc);
    panel_block<m, 1>(panel + half_size, half_size, k_count, rows, k_first, acc + kHalfRows);
}

using PanelRows = void (*)(const float*, int64_t, const float* const*, int64_t, float*);
constexpr PanelRows kPanelRows[kRowBlock] = {panel_rows<1>, panel_rows<2>, panel_rows<3>,
                                             panel_rows<4>, panel_rows<5>, panel_rows<6>};

// Adds a part of k, decoded once, for all rows, in blocks of even size.
void add_panel(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, int64_t k_first, float* panel,
               float* acc) {
    decode_panel(tile, supers, panel);
    for_even_parts(m, kRowBlock, [&](int64_t i, int64_t n) {
        kPanelRows[n - 1](panel, supers * kSuperK, rows + i, k_first, acc + i * kTileRows);
    });
}

// ------------------------------------------------------------------------------------------------------- registers

// 32 k of eight rows of the tile: total[i][a, b] += scale * (weights * x). Even and odd nibbles have sums of their own
// when there are few rows, to hide the latency of FMA. line, scales: of these rows; x: at the first of the 32 k.
template <int m>
inline void few_group(const uint8_t* line, const uint8_t* scales, const float* const* x, __m256 (*total)[2]) {
    constexpr int kSplit = m <= 2 ? 2 : 1;
    __m256 sum[m][kSplit][2];
    for_each<m * kSplit * 2>([&](int i) { (&sum[0][0][0])[i] = _mm256_setzero_ps(); });
    const auto multiply = [&](int split, int k, Pairs w) {
        for_each<m>([&](int i) {
            const __m256 pair = broadcast_pair(x[i] + k);
            __m256* s = sum[i][split % kSplit];
            s[0] = _mm256_fmadd_ps(w.a, pair, s[0]);
            s[1] = _mm256_fmadd_ps(w.b, pair, s[1]);
        });
    };
    for_each<4>([&](int step) {
        Pairs first, second;
        decode<0>(load(line + step * kStepBytes), first, second);
        multiply(0, step * kStepK, first);
        multiply(0, step * kStepK + 4, second);
        decode<1>(load(line + step * kStepBytes), first, second);
        multiply(1, step * kStepK + 2, first);
        multiply(1, step * kStepK + 6, second);
    });
    const __m256 scale = finite_scales_of(scales);
    const __m256 scale_a = _mm256_unpacklo_ps(scale, scale), scale_b = _mm256_unpackhi_ps(scale, scale);
    for_each<m>([&](int i) {
        const auto part = [&](int c) {
            return kSplit == 1 ? sum[i][0][c] : _mm256_add_ps(sum[i][0][c], sum[i][kSplit - 1][c]);
        };
        total[i][0] = _mm256_fmadd_ps(part(0), scale_a, total[i][0]);
        total[i][1] = _mm256_fmadd_ps(part(1), scale_b, total[i][1]);
    });
}

template <int m>
void few_rows(const uint8_t* tile, int64_t supers, const float* const* rows, float* panel, float* acc) {
    __m256 total[4][m][2];  // by group
    for_each<4 * m * 2>([&](int i) { (&total[0][0][0])[i] = _mm256_setzero_ps(); });
    for (int64_t s = 0; s < supers; s++, tile += kSuperBytes) {
        prefetch_ahead(tile);
        if (weights_may_overflow(tile)) {
            add_panel(tile, 1, rows, m, s * kSuperK, panel, acc);
            continue;
        }
        for (int kb = 0; kb < 2; kb++) {
            const float* x[m];
            for_each<m>([&](int i) { x[i] = rows[i] + s * kSuperK + kb * kBlock; });
            // Neither unrolled nor with pointers that the compiler knows to stay: it would share the broadcasts of x
            // among groups by keeping all of them on the stack, which costs a third of the speed.
#pragma GCC unroll 1
            for (int64_t group = 0; group < 4; group++) {
                for_each<m>([&](int i) { asm("" : "+r"(x[i])); });
                few_group<m>(line_of(tile, kb * 4, 0) + group * 32, scale_of(tile, kb, 0) + group * kGroupRows, x,
                             total[group]);
            }
        }
    }
    for (int i = 0; i < m; i++) {
        for (int group = 0; group < 4; group++) {
            float* out = acc + i * kTileRows + group * kGroupRows;
            const __m256 sum = _mm256_hadd_ps(total[group][i][0], total[group][i][1]);
            _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), sum));
        }
    }
}

using FewRows = void (*)(const uint8_t*, int64_t, const float* const*, float*, float*);
constexpr FewRows kFewRows[kFewRowBlock] = {few_rows<1>, few_rows<2>, few_rows<3>, few_rows<4>};

}  // namespace

void avx2_few(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, void* panel, float* acc) {
    for_even_parts(m, kFewRowBlock, [&](int64_t i, int64_t n) {
        kFewRows[n - 1](tile, supers, rows + i, static_cast<float*>(panel), acc + i * kTileRows);
    });
}

void avx2_many(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, void* panel, float* acc) {
    for_even_parts(supers, kPanelSupers, [&](int64_t s, int64_t n) {
        add_panel(tile + s * kSuperBytes, n, rows, m, s * kSuperK, static_cast<float*>(panel), acc);
    });
}

}  // namespace mxfp4::cpu
