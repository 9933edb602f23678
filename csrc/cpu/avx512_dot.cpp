// Matrix products for AVX-512, exact weights times fp32 rows.
//
// few: a line is 16 dwords of 8 codes. One shift brings a code to the low bits of its dword and one permutation of a
// 16-entry table makes it fp32 (only the low four index bits count), so 16 weights cost two instructions and one FMA
// per row of x. Sums are multiplied by the scale once per 32 k.
//
// many: decodes up to 512 k of the tile into an fp32 panel [k][32], scale folded in (a power of two: exact), and runs a
// 12 x 32 register block over it.
//
// Steps, 2026-11-30, a core of an Intel Xeon with AVX512-BF16 and AMX (Sapphire Rapids), weights in L2, packed GB/s and
// GFLOP/s:
//
//   expected                           found
//   M = 1: 3 instructions for 16       13.1 GB/s: two zmm ports, 1.5 cycles for 8 bytes, as expected
//   M = 6: as FMA, 1/4 of it decoding  117 GFLOP/s, against 67 of vdpbf16ps there: isa.cpp prefers this table on Intel
//   many, M = 32 and more              132 to 138 GFLOP/s; overtakes few at about 20 rows
//   M = 1 from memory, 2 threads       10 GB/s of 26: decoding and reading took turns, so lines are prefetched now
#include "avx512_dot.h"

#include "avx512_vector.h"

namespace mxfp4::cpu {
namespace {

constexpr int kPanelSupers = 8;
constexpr int kPanelRowBlock = 12;   // 24 of 32 registers accumulate
constexpr int kFewRowBlock = 6;      // 12 sums of a block and 12 totals
constexpr int kFewRowsOfStream = 2;  // up to this many rows memory is the limit, and prefetching pays

inline __m512 element_table() {
    return _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f,
                          -4.0f, -6.0f);
}

// Codes n of the 16 dwords.
inline __m512 decode(__m512i line, int n, __m512 table) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(line, static_cast<unsigned>(4 * n)), table);
}

// panel [supers * 64][32]
void decode_panel(const uint8_t* tile, int64_t supers, float* panel) {
    const __m512 table = element_table();
    for (int64_t s = 0; s < supers; s++, tile += kSuperBytes) {
        for (int half = 0; half < 2; half++) {
            const __m512 scale[2] = {scales_of(tile, 0, half), scales_of(tile, 1, half)};
            float* out = panel + s * kSuperK * kTileRows + half * kHalfRows;
            for (int step = 0; step < 8; step++, out += kStepK * kTileRows) {
                const __m512i line = load_line(tile, step, half);
                for_each<8>([&](int n) {
                    _mm512_storeu_ps(out + kNibbleToK[n] * kTileRows,
                                     _mm512_mul_ps(decode(line, n, table), scale[step / 4]));
                });
            }
        }
    }
}

// acc[i * 32 + row] += panel * x. One chain of sums per output, in the order of k, whatever m is.
template <int m>
void panel_rows(const float* panel, int64_t k_count, const float* const* rows, int64_t k_first, float* acc) {
    __m512 sum[m][2];
    const float* x[m];
    for_each<m>([&](int i) {
        x[i] = rows[i] + k_first;
        sum[i][0] = _mm512_loadu_ps(acc + i * kTileRows);
        sum[i][1] = _mm512_loadu_ps(acc + i * kTileRows + kHalfRows);
    });
    for (int64_t k = 0; k < k_count; k++) {
        const __m512 w0 = _mm512_loadu_ps(panel + k * kTileRows),
                     w1 = _mm512_loadu_ps(panel + k * kTileRows + kHalfRows);
        for_each<m>([&](int i) {
            const __m512 value = _mm512_set1_ps(x[i][k]);
            sum[i][0] = _mm512_fmadd_ps(w0, value, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(w1, value, sum[i][1]);
        });
    }
    for_each<m>([&](int i) {
        _mm512_storeu_ps(acc + i * kTileRows, sum[i][0]);
        _mm512_storeu_ps(acc + i * kTileRows + kHalfRows, sum[i][1]);
    });
}

using PanelRows = void (*)(const float*, int64_t, const float* const*, int64_t, float*);
constexpr PanelRows kPanelRows[kPanelRowBlock] = {panel_rows<1>, panel_rows<2>,  panel_rows<3>,  panel_rows<4>,
                                                  panel_rows<5>, panel_rows<6>,  panel_rows<7>,  panel_rows<8>,
                                                  panel_rows<9>, panel_rows<10>, panel_rows<11>, panel_rows<12>};

// Adds a part of k, decoded once, for all rows, in blocks of even size.
void add_panel(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, int64_t k_first, float* panel,
               float* acc) {
    decode_panel(tile, supers, panel);
    int64_t i = 0;
    for (int64_t blocks = (m + kPanelRowBlock - 1) / kPanelRowBlock; blocks > 0; blocks--) {
        const int64_t n = (m - i + blocks - 1) / blocks;
        kPanelRows[n - 1](panel, supers * kSuperK, rows + i, k_first, acc + i * kTileRows);
        i += n;
    }
}

// 32 k of the tile: total[i][half] += scale * (weights * x); x at the first of the 32 k. Several sums per output where
// few rows would leave FMA waiting for itself.
template <int m>
inline void few_block(const uint8_t* super, int kb, const float* const* x, __m512 table, __m512 (*total)[2]) {
    constexpr int kSplit = m == 1 ? 4 : m <= 3 ? 2 : 1;
    __m512 sum[m][kSplit][2];
    for_each<m * kSplit * 2>([&](int i) { (&sum[0][0][0])[i] = _mm512_setzero_ps(); });
    for_each<4>([&](int step) {
        const __m512i line0 = load_line(super, kb * 4 + step, 0), line1 = load_line(super, kb * 4 + step, 1);
        for_each<8>([&](int n) {
            const __m512 w0 = decode(line0, n, table), w1 = decode(line1, n, table);
            for_each<m>([&](int i) {
                const __m512 value = _mm512_set1_ps(x[i][step * kStepK + kNibbleToK[n]]);
                __m512* s = sum[i][n % kSplit];
                s[0] = _mm512_fmadd_ps(w0, value, s[0]);
                s[1] = _mm512_fmadd_ps(w1, value, s[1]);
            });
        });
    });
    for_each<2>([&](int half) {
        const __m512 scale = scales_of(super, kb, half);
        for_each<m>([&](int i) {
            __m512 all = sum[i][0][half];
            for_each<kSplit - 1>([&](int part) { all = _mm512_add_ps(all, sum[i][part + 1][half]); });
            total[i][half] = _mm512_fmadd_ps(all, scale, total[i][half]);
        });
    });
}

template <int m>
void few_rows(const uint8_t* tile, int64_t supers, const float* const* rows, float* panel, float* acc) {
    const __m512 table = element_table();
    __m512 total[m][2];
    for_each<m * 2>([&](int i) { (&total[0][0])[i] = _mm512_setzero_ps(); });
    for (int64_t s = 0; s < supers; s++, tile += kSuperBytes) {
        if (m <= kFewRowsOfStream) prefetch_ahead(tile);
        if (has_scale_outside(tile, 0, kOverflowByte - 1)) {
            add_panel(tile, 1, rows, m, s * kSuperK, panel, acc);
            continue;
        }
        for (int kb = 0; kb < 2; kb++) {
            const float* x[m];
            for_each<m>([&](int i) { x[i] = rows[i] + s * kSuperK + kb * kBlock; });
            few_block<m>(tile, kb, x, table, total);
        }
    }
    for_each<m * 2>([&](int i) {
        float* out = acc + i * kHalfRows;
        _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), (&total[0][0])[i]));
    });
}

using FewRows = void (*)(const uint8_t*, int64_t, const float* const*, float*, float*);
constexpr FewRows kFewRows[kFewRowBlock] = {few_rows<1>, few_rows<2>, few_rows<3>,
                                            few_rows<4>, few_rows<5>, few_rows<6>};

}  // namespace

void avx512_few(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, void* panel, float* acc) {
    int64_t i = 0;
    for (int64_t blocks = (m + kFewRowBlock - 1) / kFewRowBlock; blocks > 0; blocks--) {
        const int64_t n = (m - i + blocks - 1) / blocks;
        kFewRows[n - 1](tile, supers, rows + i, static_cast<float*>(panel), acc + i * kTileRows);
        i += n;
    }
}

void avx512_many(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, void* panel, float* acc) {
    int64_t s = 0;
    for (int64_t parts = (supers + kPanelSupers - 1) / kPanelSupers; parts > 0; parts--) {
        const int64_t n = (supers - s + parts - 1) / parts;
        add_panel(tile + s * kSuperBytes, n, rows, m, s * kSuperK, static_cast<float*>(panel), acc);
        s += n;
    }
}

}  // namespace mxfp4::cpu
