// Chooses the kernel table once. Compiled for the baseline, so that it runs on every CPU.
#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace mxfp4::cpu {

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> tables = {&scalar_kernels()};
#if defined(MXFP4_X86)
    // These built-ins also ask the operating system (xgetbv) whether it saves the wide registers.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (!avx2) return tables;
    tables.push_back(&avx2_kernels());
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!avx512) return tables;
    tables.push_back(&avx512_kernels());
    if (__builtin_cpu_supports("avx512vnni")) tables.push_back(&avx512_vnni_kernels());
    if (__builtin_cpu_supports("avx512bf16")) tables.push_back(&avx512_bf16_kernels());
#endif
    return tables;
}

const Kernels& kernels_named(const std::string& name) {
    std::string names;
    for (const Kernels* table : available_kernels()) {
        if (name == table->name) return *table;
        names += (names.empty() ? "" : ", ") + std::string(table->name);
    }
    throw std::runtime_error("mxfp4_ops: CPU instruction set '" + name + "' is not available; this CPU has: " + names +
                             " (see the environment variable MXFP4_CPU_ISA)");
}

// The table that is fastest here. vdpbf16ps runs at the rate of FMA on AMD, with twice the products; on Intel (measured
// on Sapphire Rapids, see avx512_dot.cpp) at half of it, where the table below it wins at every number of rows.
const Kernels& preferred_kernels() {
    const std::vector<const Kernels*> tables = available_kernels();
#if defined(MXFP4_X86)
    const bool has_bf16 = std::strcmp(tables.back()->name, "avx512_bf16") == 0;
    if (has_bf16 && !__builtin_cpu_is("amd")) return *tables[tables.size() - 2];
#endif
    return *tables.back();
}

const Kernels& kernels() {
    static const Kernels& chosen = []() -> const Kernels& {
        const char* wish = std::getenv("MXFP4_CPU_ISA");
        return wish != nullptr ? kernels_named(wish) : preferred_kernels();
    }();
    return chosen;
}

}  // namespace mxfp4::cpu
