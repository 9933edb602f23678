// The AVX2 table (with FMA and F16C): element-wise kernels; the matrix products are in avx2_dot.cpp.
#include <immintrin.h>

#include "activation.h"
#include "avx2_dot.h"
#include "avx2_int.h"
#include "kernels.h"

namespace mxfp4::cpu {
namespace {

constexpr int kLanes = 8;

inline __m256i magnitude_mask() {
    return _mm256_set1_epi32(0x7fffffff);
}

// Nearest even bf16 in the low word of each lane. NaN keeps its upper bits and becomes quiet.
inline __m256i bf16_words(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), quiet, is_nan);
}

inline __m128i pack_words(__m256i dwords) {
    const __m256i packed = _mm256_packus_epi32(dwords, dwords);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)));
}

void to_float(const void* src, Dtype dtype, float* dst, int64_t n) {
    const int64_t whole = dtype == Dtype::bf16 || dtype == Dtype::f16 ? n / kLanes * kLanes : 0;
    const auto* words = static_cast<const uint16_t*>(src);
    for (int64_t i = 0; i < whole; i += kLanes) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + i));
        const __m256i bf16 = _mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
        _mm256_storeu_ps(dst + i, dtype == Dtype::bf16 ? _mm256_castsi256_ps(bf16) : _mm256_cvtph_ps(raw));
    }
    if (dtype == Dtype::f32) {
        memcpy(dst, src, static_cast<size_t>(n) * sizeof(float));
    } else if (whole < n) {
        scalar_kernels().to_float(static_cast<const char*>(src) + whole * dtype_bytes(dtype), dtype, dst + whole,
                                  n - whole);
    }
}

void from_float(const float* src, Dtype dtype, void* dst, int64_t n) {
    if (dtype == Dtype::f32) {
        memcpy(dst, src, static_cast<size_t>(n) * sizeof(float));
        return;
    }
    const int64_t whole = n / kLanes * kLanes;
    auto* words = static_cast<uint16_t*>(dst);
    for (int64_t i = 0; i < whole; i += kLanes) {
        const __m256 value = _mm256_loadu_ps(src + i);
        const __m128i rounded =
            dtype == Dtype::bf16 ? pack_words(bf16_words(value)) : _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(words + i), rounded);
    }
    if (whole < n) scalar_kernels().from_float(src + whole, dtype, words + whole, n - whole);
}

inline uint32_t largest_lane(__m256i v) {
    const __m128i half = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i quarter = _mm_max_epu32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(1, 0, 3, 2)));
    const __m128i eighth = _mm_max_epu32(quarter, _mm_shuffle_epi32(quarter, _MM_SHUFFLE(2, 3, 0, 1)));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(eighth));
}

// Codes with sign, one per dword: counts the rounding thresholds below the magnitude, as nearest_magnitude_code does.
inline __m256i encode(__m256i bits, __m256 factor) {
    const __m256 v = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(bits, magnitude_mask())), factor);
    const auto above = [&](float bound) {
        return _mm256_castps_si256(_mm256_cmp_ps(v, _mm256_set1_ps(bound), _CMP_GT_OQ));
    };
    const auto from = [&](float bound) {
        return _mm256_castps_si256(_mm256_cmp_ps(v, _mm256_set1_ps(bound), _CMP_GE_OQ));
    };
    const __m256i low = _mm256_add_epi32(_mm256_add_epi32(above(0.25f), from(0.75f)), above(1.25f));
    const __m256i high =
        _mm256_add_epi32(_mm256_add_epi32(from(1.75f), above(2.5f)), _mm256_add_epi32(from(3.5f), above(5.0f)));
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(bits, 31), 3);
    return _mm256_sub_epi32(sign, _mm256_add_epi32(low, high));  // a true comparison is -1
}

// 32 codes in four vectors of dwords, in order, to 16 bytes.
inline __m128i pack_nibbles(const __m256i* codes) {
    const __m256i words01 = _mm256_packus_epi32(codes[0], codes[1]), words23 = _mm256_packus_epi32(codes[2], codes[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works per 128-bit lane
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words01, words23), order);
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));  // even + 16 * odd
    return _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

void quant(const float* x, int64_t n, ScaleRule rule, uint8_t* blocks, uint8_t* scales) {
    for (int64_t b = 0; b < n / kBlock; b++) {
        __m256i bits[4], largest = _mm256_setzero_si256();
        for (int i = 0; i < 4; i++) {
            bits[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + b * kBlock + i * kLanes));
            largest = _mm256_max_epu32(largest, _mm256_and_si256(bits[i], magnitude_mask()));
        }
        scales[b] = choose_scale(largest_lane(largest), rule);
        __m128i packed = _mm_setzero_si128();
        if (scales[b] != kScaleNaN) {
            const __m256 factor = _mm256_set1_ps(float_from_bits(inverse_scale_bits(scales[b])));
            for (__m256i& value : bits) value = encode(value, factor);
            packed = pack_nibbles(bits);
        }
        _mm_storeu_si128(reinterpret_cast<__m128i*>(blocks + b * (kBlock / 2)), packed);
    }
}

// Eight codes, one per byte, times the scale. The permutation looks at the low three bits only: the magnitude.
inline __m256 decode(__m128i codes, __m256 magnitudes, __m256 scale) {
    const __m256i wide = _mm256_cvtepu8_epi32(codes);
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(wide, 3), 31);
    const __m256 magnitude = _mm256_permutevar8x32_ps(magnitudes, wide);
    return _mm256_mul_ps(_mm256_or_ps(magnitude, _mm256_castsi256_ps(sign)), scale);
}

void dequant(const uint8_t* blocks, const uint8_t* scales, int64_t n, float* out) {
    const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m128i mask = _mm_set1_epi8(15);
    for (int64_t b = 0; b < n / kBlock; b++) {
        const __m256 scale = _mm256_set1_ps(float_from_bits(scale_bits(scales[b])));
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks + b * (kBlock / 2)));
        const __m128i even = _mm_and_si128(bytes, mask), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
        const __m128i halves[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
        for (int i = 0; i < 4; i++) {
            const __m128i codes = i % 2 == 0 ? halves[i / 2] : _mm_srli_si128(halves[i / 2], 8);
            _mm256_storeu_ps(out + b * kBlock + i * kLanes, decode(codes, magnitudes, scale));
        }
    }
}

int range(const float* x, int64_t n, float tiny) {
    const int64_t whole = n / kLanes * kLanes;
    const __m256 zero = _mm256_setzero_ps(), infinity = _mm256_set1_ps(__builtin_inff());
    __m256 found_tiny = zero, found_huge = zero;
    for (int64_t i = 0; i < whole; i += kLanes) {
        const __m256 v = _mm256_and_ps(_mm256_loadu_ps(x + i), _mm256_castsi256_ps(magnitude_mask()));
        const __m256 small = _mm256_cmp_ps(v, _mm256_set1_ps(tiny), _CMP_LT_OQ);
        const __m256 large = _mm256_cmp_ps(v, _mm256_set1_ps(kHuge), _CMP_GT_OQ);
        found_tiny = _mm256_or_ps(found_tiny, _mm256_and_ps(small, _mm256_cmp_ps(v, zero, _CMP_GT_OQ)));
        found_huge = _mm256_or_ps(found_huge, _mm256_and_ps(large, _mm256_cmp_ps(v, infinity, _CMP_LT_OQ)));
    }
    const int rest = whole < n ? scalar_kernels().range(x + whole, n - whole, tiny) : 0;
    return rest | (_mm256_movemask_ps(found_tiny) != 0 ? kHasTiny : 0) |
           (_mm256_movemask_ps(found_huge) != 0 ? kHasHuge : 0);
}

void activate(const ActivationParams& params, float* tile, int64_t m) {
    activate_tile(params, tile, m);
}

void accumulate(float* acc, const float* y, float w, int64_t n) {
    for (int64_t i = 0; i < n; i++) acc[i] += w * y[i];
}

}  // namespace

const Kernels& avx2_kernels() {
    static const Kernels table = [] {
        Kernels k = scalar_kernels();
        k.name = "avx2";
        k.to_float = to_float;
        k.from_float = from_float;
        k.quant = quant;
        k.dequant = dequant;
        k.few = avx2_few;
        k.many = avx2_many;
        k.few_limit = kAvx2FewLimit;
        k.quantize_row = avx2_quantize_row;
        k.dot_int = avx2_dot_int;
        k.int_limit = 2;  // 66 and 51 GFLOP/s (two planes, three) against 48 of `few` at two rows, 62 at three
        k.range = range;
        k.activate = activate;
        k.accumulate = accumulate;
        return k;
    }();
    return table;
}

}  // namespace mxfp4::cpu
