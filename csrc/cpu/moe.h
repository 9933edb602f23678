// The mixture-of-experts layer on packed weights. Knows neither an instruction set nor torch.
#pragma once

#include <stdint.h>

#include <functional>

#include "kernels.h"

namespace mxfp4::cpu {

struct Bias {
    const void* data;  // null means none; [experts, width]
    Dtype dtype;
};

struct MoeArgs {
    int64_t tokens, hidden, intermediate, experts, top_k;
    Dtype dtype;                // of x and out: f32, bf16 or f16
    const void* x;              // [tokens, hidden]
    const int32_t* topk_ids;    // [tokens, top_k], -1 = skip
    const float* topk_weights;  // [tokens, top_k]
    const uint8_t* w13;         // tiles of [experts, 1 or 2 x intermediate, hidden], see tile.h
    Bias w13_bias;              // [experts, 1 or 2 x padded intermediate]
    const uint8_t* w2;          // tiles of [experts, hidden, intermediate]
    Bias w2_bias;               // [experts, padded hidden]
    ActivationParams activation;
    bool weight_on_input;
    bool batch_invariant;
    void* out;  // [tokens, hidden]
};

// How to run on several threads: run(n, body) calls body(0) ... body(n - 1), n <= count, perhaps at once.
struct Threads {
    int64_t count;
    std::function<void(int64_t n, const std::function<void(int64_t)>& body)> run;
};

int64_t moe_workspace_bytes(const Kernels& kernels, const MoeArgs& args, int64_t threads);

// Writes all of args.out. The workspace may hold anything.
void moe(const Kernels& kernels, const MoeArgs& args, void* workspace, const Threads& threads);

}  // namespace mxfp4::cpu
