// The AVX512-BF16 table: starts from AVX-512 and adds products with rows of bf16 by vdpbf16ps, which multiplies pairs
// of bf16 exactly and adds them in fp32. It takes subnormal inputs and results for zero, so rows with tiny values and
// weights that are subnormal in bf16 do not come here.
//
// A line is 16 dwords of 8 codes; shifted by 4j, the two words of a dword hold codes k = 2j and 2j + 1, and one
// permutation of words with a 32-entry table (the 16 bf16 patterns twice: only five index bits count, and the fifth
// belongs to the next code) makes both bf16.
//
// few_bf16: sums are multiplied by the scale once per 32 k, in fp32.
// many_bf16: decodes up to 512 k of the tile into a bf16 panel [k / 2][32][2]. The scale is folded in exactly: the
// table holds patterns with the exponent lifted by 250 - 127, and (250 - b) << 7 is subtracted with unsigned
// saturation, which turns both zeros into 0. This needs b <= 250, and b >= 64 so that products with |x| >= 2^-62
// (kTinyBf16) are no subnormals, which vdpbf16ps would flush.
//
// Steps, 2026-11-30, a core of an Intel Xeon of Sapphire Rapids, weights in L2: few 12.3 GB/s of packed bytes at one
// row, 67 GFLOP/s at six; many 76 GFLOP/s. vdpbf16ps runs at half the rate of FMA there, so the fp32 kernels are faster
// (117 and 135 GFLOP/s) and isa.cpp prefers them. Where it runs at the full rate, on AMD, a prototype of this scheme
// reached 435 GFLOP/s on two Zen 4 cores at six rows, twice the peak of fp32; these kernels were not run there.
#include "avx512_dot.h"
#include "avx512_vector.h"
#include "kernels.h"

namespace mxfp4::cpu {
namespace {

constexpr int kPanelSupers = 8;
constexpr int kPanelRowBlock = 12;
constexpr int kFewRowBlock = 6;
constexpr int kFoldBias = 250;  // the largest scale byte whose weights have a bf16 pattern in the lifted table
constexpr int kFoldLeast = 64;  // the least scale byte whose products with |x| >= kTinyBf16 are normal numbers

struct WordTable {
    alignas(64) uint16_t words[32];
};

constexpr WordTable word_table(int lifted_by) {
    WordTable table{};
    for (uint32_t i = 0; i < 32; i++) {
        const bool zero = (i & 7) == 0;
        const uint32_t pattern = element_bits(i & 15) >> 16;
        table.words[i] =
            static_cast<uint16_t>(zero && lifted_by != 0 ? 0 : pattern + (static_cast<uint32_t>(lifted_by) << 7));
    }
    return table;
}

constexpr WordTable kElements = word_table(0), kLiftedElements = word_table(kFoldBias - kScaleBias);

// Codes 2j and 2j + 1 of the 16 dwords.
inline __m512i decode(__m512i line, int j, __m512i table) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(line, static_cast<unsigned>(4 * j)), table);
}

inline __m512i broadcast_pair(const uint16_t* x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return _mm512_set1_epi32(pair);
}

inline __m512 multiply_pairs(__m512 sum, __m512i w, __m512i x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
}

// -------------------------------------------------------------------------------------------------------- registers

// 32 k of the tile: total[i][half] += scale * (weights * x); x at the first of the 32 k.
template <int m>
inline void few_block(const uint8_t* super, int kb, const uint16_t* const* x, __m512i table, __m512 (*total)[2]) {
    constexpr int kSplit = m <= 2 ? 2 : 1;  // several sums per output hide the latency of vdpbf16ps
    __m512 sum[m][kSplit][2];
    for_each<m * kSplit * 2>([&](int i) { (&sum[0][0][0])[i] = _mm512_setzero_ps(); });
    for_each<4>([&](int step) {
        const __m512i line0 = load_line(super, kb * 4 + step, 0), line1 = load_line(super, kb * 4 + step, 1);
        for_each<4>([&](int j) {
            const __m512i w0 = decode(line0, j, table), w1 = decode(line1, j, table);
            for_each<m>([&](int i) {
                const __m512i pair = broadcast_pair(x[i] + step * kStepK + 2 * j);
                __m512* s = sum[i][j % kSplit];
                s[0] = multiply_pairs(s[0], w0, pair);
                s[1] = multiply_pairs(s[1], w1, pair);
            });
        });
    });
    for_each<2>([&](int half) {
        const __m512 scale = scales_of(super, kb, half);
        for_each<m>([&](int i) {
            const __m512 all = kSplit == 1 ? sum[i][0][half] : _mm512_add_ps(sum[i][0][half], sum[i][kSplit - 1][half]);
            total[i][half] = _mm512_fmadd_ps(all, scale, total[i][half]);
        });
    });
}

template <int m>
bool few_rows(const uint8_t* tile, int64_t supers, const uint16_t* const* rows, float* acc) {
    const __m512i table = _mm512_load_si512(kElements.words);
    __m512 total[m][2];
    for_each<m * 2>([&](int i) { (&total[0][0])[i] = _mm512_setzero_ps(); });
    for (int64_t s = 0; s < supers; s++, tile += kSuperBytes) {
        if (has_scale_outside(tile, 0, kOverflowByte - 1)) return false;
        for (int kb = 0; kb < 2; kb++) {
            const uint16_t* x[m];
            for_each<m>([&](int i) { x[i] = rows[i] + s * kSuperK + kb * kBlock; });
            few_block<m>(tile, kb, x, table, total);
        }
    }
    for_each<m * 2>([&](int i) {
        float* out = acc + i * kHalfRows;
        _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), (&total[0][0])[i]));
    });
    return true;
}

using FewRows = bool (*)(const uint8_t*, int64_t, const uint16_t* const*, float*);
constexpr FewRows kFewRows[kFewRowBlock] = {few_rows<1>, few_rows<2>, few_rows<3>,
                                            few_rows<4>, few_rows<5>, few_rows<6>};

bool few_bf16(const uint8_t* tile, int64_t supers, const uint16_t* const* rows, int64_t m, void*, float* acc) {
    int64_t i = 0;
    for (int64_t blocks = (m + kFewRowBlock - 1) / kFewRowBlock; blocks > 0; blocks--) {
        const int64_t n = (m - i + blocks - 1) / blocks;
        if (!kFewRows[n - 1](tile, supers, rows + i, acc + i * kTileRows)) return false;
        i += n;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------------------ panel

// (250 - b) << 7 in both words of each dword, for 16 rows.
inline __m512i exponent_drop(const uint8_t* super, int block, int half) {
    const uint8_t* bytes = scale_of(super, block, half * kHalfRows);
    const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m512i word = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(kFoldBias), b), 7);
    return _mm512_or_si512(word, _mm512_slli_epi32(word, 16));
}

// panel [supers * 32][32][2]
void decode_panel(const uint8_t* tile, int64_t supers, uint16_t* panel) {
    const __m512i table = _mm512_load_si512(kLiftedElements.words);
    constexpr int kPairWords = 2 * kTileRows;
    for (int64_t s = 0; s < supers; s++, tile += kSuperBytes) {
        for (int half = 0; half < 2; half++) {
            const __m512i drop[2] = {exponent_drop(tile, 0, half), exponent_drop(tile, 1, half)};
            uint16_t* out = panel + s * (kSuperK / 2) * kPairWords + half * kTileRows;
            for (int step = 0; step < 8; step++, out += 4 * kPairWords) {
                const __m512i line = load_line(tile, step, half);
                for_each<4>([&](int j) {
                    _mm512_storeu_si512(out + j * kPairWords,
                                        _mm512_subs_epu16(decode(line, j, table), drop[step / 4]));
                });
            }
        }
    }
}

// acc[i * 32 + row] += panel * x. One chain of sums per output, in the order of k, whatever m is.
template <int m>
void panel_rows(const uint16_t* panel, int64_t k_count, const uint16_t* const* rows, int64_t k_first, float* acc) {
    __m512 sum[m][2];
    const uint16_t* x[m];
    for_each<m>([&](int i) {
        x[i] = rows[i] + k_first;
        sum[i][0] = _mm512_loadu_ps(acc + i * kTileRows);
        sum[i][1] = _mm512_loadu_ps(acc + i * kTileRows + kHalfRows);
    });
    for (int64_t k = 0; k < k_count; k += 2) {
        const __m512i w0 = _mm512_loadu_si512(panel + k * kTileRows);
        const __m512i w1 = _mm512_loadu_si512(panel + k * kTileRows + kTileRows);
        for_each<m>([&](int i) {
            const __m512i pair = broadcast_pair(x[i] + k);
            sum[i][0] = multiply_pairs(sum[i][0], w0, pair);
            sum[i][1] = multiply_pairs(sum[i][1], w1, pair);
        });
    }
    for_each<m>([&](int i) {
        _mm512_storeu_ps(acc + i * kTileRows, sum[i][0]);
        _mm512_storeu_ps(acc + i * kTileRows + kHalfRows, sum[i][1]);
    });
}

using PanelRows = void (*)(const uint16_t*, int64_t, const uint16_t* const*, int64_t, float*);
constexpr PanelRows kPanelRows[kPanelRowBlock] = {panel_rows<1>, panel_rows<2>,  panel_rows<3>,  panel_rows<4>,
                                                  panel_rows<5>, panel_rows<6>,  panel_rows<7>,  panel_rows<8>,
                                                  panel_rows<9>, panel_rows<10>, panel_rows<11>, panel_rows<12>};

bool many_bf16(const uint8_t* tile, int64_t supers, const uint16_t* const* rows, int64_t m, void* panel, float* acc) {
    for (int64_t s = 0; s < supers; s++) {
        if (has_scale_outside(tile + s * kSuperBytes, kFoldLeast, kFoldBias)) return false;
    }
    auto* words = static_cast<uint16_t*>(panel);
    int64_t s = 0;
    for (int64_t parts = (supers + kPanelSupers - 1) / kPanelSupers; parts > 0; parts--) {
        const int64_t n = (supers - s + parts - 1) / parts;
        decode_panel(tile + s * kSuperBytes, n, words);
        int64_t i = 0;
        for (int64_t blocks = (m + kPanelRowBlock - 1) / kPanelRowBlock; blocks > 0; blocks--) {
            const int64_t count = (m - i + blocks - 1) / blocks;
            kPanelRows[count - 1](words, n * kSuperK, rows + i, s * kSuperK, acc + i * kTileRows);
            i += count;
        }
        s += n;
    }
    return true;
}

}  // namespace

const Kernels& avx512_bf16_kernels() {
    static const Kernels table = [] {
        Kernels k = avx512_kernels();
        k.name = "avx512_bf16";
        k.few_bf16 = few_bf16;
        k.many_bf16 = many_bf16;
        k.few_limit_bf16 = kAvx512Bf16FewLimit;
        return k;
    }();
    return table;
}

}  // namespace mxfp4::cpu
