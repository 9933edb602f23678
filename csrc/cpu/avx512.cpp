// avx512 kernels: starts from avx2.
#include "kernels.h"

namespace mxfp4::cpu {

const Kernels& avx512_kernels() {
    static const Kernels table = [] {
        Kernels k = avx2_kernels();
        k.name = "avx512";
        return k;
    }();
    return table;
}

}  // namespace mxfp4::cpu
