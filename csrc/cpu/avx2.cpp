// avx2 kernels: starts from scalar.
#include "kernels.h"

namespace mxfp4::cpu {

const Kernels& avx2_kernels() {
    static const Kernels table = [] {
        Kernels k = scalar_kernels();
        k.name = "avx2";
        return k;
    }();
    return table;
}

}  // namespace mxfp4::cpu
