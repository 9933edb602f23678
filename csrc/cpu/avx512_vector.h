// Pieces that the AVX-512 products share. In an anonymous namespace; see the note on weak symbols in format.h.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "../format.h"
#include "tile.h"

namespace mxfp4::cpu {
namespace {

constexpr int kHalfRows = 16;
constexpr uint8_t kOverflowByte = 253;  // from here on, 4 and 6 times the scale leave fp32

// Calls f(0) ... f(n - 1), unrolled before arrays are split into registers; without it they stay in memory.
template <int n, class F>
__attribute__((always_inline)) inline void for_each(F f) {
#pragma GCC unroll 32
    for (int i = 0; i < n; i++) f(i);
}

inline __m512i load_line(const uint8_t* super, int step, int half) {
    return _mm512_loadu_si512(line_of(super, step, half));
}

// Scale bytes of 16 rows as fp32.
inline __m512 scales_of(const uint8_t* super, int block, int half) {
    const uint8_t* bytes = scale_of(super, block, half * kHalfRows);
    const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __mmask16 special = static_cast<__mmask16>(_mm512_cmpeq_epi32_mask(b, _mm512_setzero_si512()) |
                                                     _mm512_cmpeq_epi32_mask(b, _mm512_set1_epi32(kScaleNaN)));
    const __m512i bits = _mm512_slli_epi32(b, 23);
    return _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, special, bits, _mm512_set1_epi32(0x400000)));
}

// Asks for the superblock that comes 8 superblocks later in the stream. Hardware stops at every page of 4 KiB; past the
// end of the weights a prefetch does nothing.
inline void prefetch_ahead(const uint8_t* super) {
    constexpr int64_t kAhead = 8, kLine = 64;
    const char* next = reinterpret_cast<const char*>(super + kAhead * kSuperBytes);
    for_each<kSuperBytes / kLine>([&](int i) { _mm_prefetch(next + i * kLine, _MM_HINT_T0); });
}

// Whether a scale byte of the superblock lies outside [low, high].
inline bool has_scale_outside(const uint8_t* super, uint8_t low, uint8_t high) {
    const __m512i shifted = _mm512_sub_epi8(_mm512_loadu_si512(super), _mm512_set1_epi8(static_cast<char>(low)));
    return _mm512_cmpgt_epu8_mask(shifted, _mm512_set1_epi8(static_cast<char>(high - low))) != 0;
}

}  // namespace
}  // namespace mxfp4::cpu
