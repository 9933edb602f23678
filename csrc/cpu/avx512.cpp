// The AVX-512 table (F, BW, VL, DQ): starts from AVX2. The matrix products are in avx512_dot.cpp.
#include <immintrin.h>

#include "activation.h"
#include "avx512_dot.h"
#include "kernels.h"

namespace mxfp4::cpu {
namespace {

void dequant(const uint8_t* blocks, const uint8_t* scales, int64_t n, float* out) {
    const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                        -2.0f, -3.0f, -4.0f, -6.0f);
    const __m128i mask = _mm_set1_epi8(15);
    for (int64_t b = 0; b < n / kBlock; b++) {
        const __m512 scale = _mm512_set1_ps(float_from_bits(scale_bits(scales[b])));
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks + b * (kBlock / 2)));
        const __m128i even = _mm_and_si128(bytes, mask), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
        const __m512i first = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(even, odd));
        const __m512i second = _mm512_cvtepu8_epi32(_mm_unpackhi_epi8(even, odd));
        _mm512_storeu_ps(out + b * kBlock, _mm512_mul_ps(_mm512_permutexvar_ps(first, table), scale));
        _mm512_storeu_ps(out + b * kBlock + 16, _mm512_mul_ps(_mm512_permutexvar_ps(second, table), scale));
    }
}

void activate(const ActivationParams& params, float* tile, int64_t m) {
    activate_tile(params, tile, m);
}

void accumulate(float* acc, const float* y, float w, int64_t n) {
    for (int64_t i = 0; i < n; i++) acc[i] += w * y[i];
}

}  // namespace

const Kernels& avx512_kernels() {
    static const Kernels table = [] {
        Kernels k = avx2_kernels();
        k.name = "avx512";
        k.dequant = dequant;
        k.few = avx512_few;
        k.many = avx512_many;
        k.few_limit = kAvx512FewLimit;
        k.quantize_row = nullptr;  // a permutation decodes 16 weights to fp32 there
        k.dot_int = nullptr;
        k.activate = activate;
        k.accumulate = accumulate;
        return k;
    }();
    return table;
}

}  // namespace mxfp4::cpu
