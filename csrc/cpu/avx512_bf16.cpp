// avx512_bf16 kernels: starts from avx512.
#include "kernels.h"

namespace mxfp4::cpu {

const Kernels& avx512_bf16_kernels() {
    static const Kernels table = [] {
        Kernels k = avx512_kernels();
        k.name = "avx512_bf16";
        return k;
    }();
    return table;
}

}  // namespace mxfp4::cpu
