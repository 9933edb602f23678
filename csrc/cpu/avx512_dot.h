// The matrix products of the AVX-512 tables; see TileDot and TileDotBf16 in kernels.h.
#pragma once

#include <stdint.h>

namespace mxfp4::cpu {

// From about this many rows on, decoding once pays for the extra pass through memory.
constexpr int64_t kAvx512FewLimit = 20;
constexpr int64_t kAvx512Bf16FewLimit = 48;

void avx512_few(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, void* panel, float* acc);
void avx512_many(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, void* panel, float* acc);

}  // namespace mxfp4::cpu
