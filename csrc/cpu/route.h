// Top-k routing: which experts a token goes to, and with what weights. Knows neither an instruction set nor torch.
//
// routing.py of the package is the definition. Both give the same bits: they do the same rounded fp32 operations in the
// same order, so that scores which nearly tie are told apart in the same way everywhere.
#pragma once

#include <stdint.h>

#include "moe.h"

namespace mxfp4::cpu {

// Values are part of the op schema.
enum class Score : int { softmax = 0, sigmoid = 1, sqrtsoftplus = 2 };

struct RouteArgs {
    int64_t tokens, experts, top_k, groups, topk_groups;  // top_k fits into the experts of topk_groups groups
    Score score;
    bool renormalize;
    float scale;
    Dtype dtype;           // of logits
    const void* logits;    // [tokens, experts]
    const float* bias;     // [experts], for the choice only; null means none
    const int32_t* given;  // [tokens, top_k], -1 or an expert: the choice was made elsewhere; null means it was not
    int32_t* ids;          // [tokens, top_k]
    float* weights;        // [tokens, top_k]
};

int64_t route_workspace_bytes(const RouteArgs& args, int64_t threads);

// Writes all of args.ids and args.weights. The workspace, 8-byte aligned, may hold anything.
void route(const Kernels& kernels, const RouteArgs& args, void* workspace, const Threads& threads);

}  // namespace mxfp4::cpu
