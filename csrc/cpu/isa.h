// Which instruction sets this CPU has, and the one that the ops use.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace mxfp4::cpu {

// Tables that this CPU can run, from the lowest (scalar) to the best.
std::vector<const Kernels*> available_kernels();

// The table with this name. Throws std::runtime_error, naming what this CPU has, when it is not available.
const Kernels& kernels_named(const std::string& name);

// The best table, or the one that the environment variable MXFP4_CPU_ISA names; chosen at the first call.
const Kernels& kernels();

}  // namespace mxfp4::cpu
