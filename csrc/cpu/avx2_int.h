// Products with integer rows of the AVX2 table; see IntRow in kernels.h.
#pragma once

#include "kernels.h"

namespace mxfp4::cpu {

void avx2_quantize_row(int64_t padded_k, IntRow* row);
void avx2_dot_int(const IntProduct& product);

}  // namespace mxfp4::cpu
