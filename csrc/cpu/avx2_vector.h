// Vector helpers of the AVX2 products. In an anonymous namespace; see the note on weak symbols in format.h.
#pragma once

#include <immintrin.h>

#include "../format.h"
#include "tile.h"

namespace mxfp4::cpu {
namespace {

constexpr int kGroupRows = 8;       // rows in 32 bytes of a line
constexpr int kOverflowByte = 253;  // from here on, 4 and 6 times the scale leave fp32

inline __m256i load(const uint8_t* bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

// Calls f(0) ... f(n - 1), unrolled before arrays are split into registers; without it they stay in memory.
template <int n, class F>
__attribute__((always_inline)) inline void for_each(F f) {
#pragma GCC unroll 32
    for (int i = 0; i < n; i++) f(i);
}

// Scale bytes of eight rows as fp32, for bytes below kOverflowByte; see scales_of in avx2_dot.cpp.
inline __m256 finite_scales_of(const uint8_t* bytes) {
    const __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    const __m256i doubled = _mm256_max_epi32(_mm256_add_epi32(b, b), _mm256_set1_epi32(1));
    return _mm256_castsi256_ps(_mm256_slli_epi32(doubled, 22));
}

// Brings a superblock that is needed 8.7 KB later: hardware prefetch stops at every page. Harmless past the end.
inline void prefetch_ahead(const uint8_t* super) {
    const auto* ahead = reinterpret_cast<const char*>(super) + 8 * kSuperBytes;
    for (int64_t i = 0; i < kSuperBytes; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T0);
}

inline bool weights_may_overflow(const uint8_t* super) {
    const __m256i largest = _mm256_max_epu8(load(super), load(super + 32));
    const __m256i excess = _mm256_subs_epu8(largest, _mm256_set1_epi8(static_cast<char>(kOverflowByte - 1)));
    return !_mm256_testz_si256(excess, excess);
}

}  // namespace
}  // namespace mxfp4::cpu
