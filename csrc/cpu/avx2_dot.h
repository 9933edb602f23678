// The matrix products of the AVX2 table; see TileDot in kernels.h.
#pragma once

#include <stdint.h>

namespace mxfp4::cpu {

constexpr int64_t kAvx2FewLimit = 8;

void avx2_few(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, void* panel, float* acc);
void avx2_many(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, void* panel, float* acc);

}  // namespace mxfp4::cpu
