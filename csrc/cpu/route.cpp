// One token after another: scores, a partial sort of integer keys, weights. Scores of all experts are computed only
// where the choice or the softmax needs them: a score without a bias grows with its logit, so the logits choose.
//
// Compiled without contraction to FMA, which would round otherwise than the definition.
#include "route.h"

#include <math.h>

#include <algorithm>

#include "activation.h"
#include "parallel_tasks.h"

namespace mxfp4::cpu {
namespace {

constexpr int64_t kTokensOfTask = 16;

int64_t power_of_two_from(int64_t n) {
    int64_t power = 1;
    while (power < n) power *= 2;
    return power;
}

// What one thread needs. Lengths are those of a token.
struct Scratch {
    uint64_t* keys;    // [experts]
    uint64_t* groups;  // [groups]
    float* logits;     // [experts]
    float* values;     // [experts]
    float* partial;    // [experts rounded up to a power of two]

    static int64_t bytes(const RouteArgs& args) {
        const int64_t floats = 2 * args.experts + power_of_two_from(args.experts);
        return (args.experts + args.groups) * 8 + (floats + 1) / 2 * 8;
    }

    Scratch(const RouteArgs& args, void* memory) {
        keys = static_cast<uint64_t*>(memory);
        groups = keys + args.experts;
        logits = reinterpret_cast<float*>(groups + args.groups);
        values = logits + args.experts;
        partial = values + args.experts;
    }
};

// log(1 + u) for 0 <= u <= 1, as 2 atanh(u / (2 + u)); the series to the 15th power is below half an ulp.
inline float log_one_plus(float u) {
    const float s = u / (2.0f + u);
    const float z = s * s;
    float p = 1.0f / 15.0f;
    p = p * z + 1.0f / 13.0f;
    p = p * z + 1.0f / 11.0f;
    p = p * z + 1.0f / 9.0f;
    p = p * z + 1.0f / 7.0f;
    p = p * z + 1.0f / 5.0f;
    p = p * z + 1.0f / 3.0f;
    return (p * z * s + s) * 2.0f;
}

inline float sqrt_softplus(float x) {
    return sqrtf(at_least(x, 0.0f) + log_one_plus(exponential(-fabsf(x))));
}

// Numerators of the scores of n logits; `largest` is the finite shift of the softmax.
void score_values(Score score, const float* logits, int64_t n, float largest, float* values) {
    switch (score) {
        case Score::softmax:
            for (int64_t i = 0; i < n; i++) values[i] = exponential(logits[i] - largest);
            break;
        case Score::sigmoid:
            for (int64_t i = 0; i < n; i++) values[i] = sigmoid(logits[i]);
            break;
        case Score::sqrtsoftplus:
            for (int64_t i = 0; i < n; i++) values[i] = sqrt_softplus(logits[i]);
            break;
    }
}

// The largest logit, which the softmax subtracts; 0 when all are -Inf, whose exponentials are then 0.
float softmax_shift(const float* logits, int64_t n) {
    float largest = -INFINITY;
    for (int64_t i = 0; i < n; i++) largest = logits[i] > largest ? logits[i] : largest;  // passes over NaN
    return largest == -INFINITY ? 0.0f : largest;
}

// Sum by halves: the order that plain torch can follow with few operations.
float halving_sum(const float* values, int64_t n, float* partial) {
    int64_t half = power_of_two_from(n);
    std::copy(values, values + n, partial);
    std::fill(partial + n, partial + half, 0.0f);
    while (half > 1) {
        half /= 2;
        for (int64_t i = 0; i < half; i++) partial[i] += partial[i + half];
    }
    return partial[0];
}

inline float nonzero(float divisor) {
    return divisor == 0.0f ? 1.0f : divisor;
}

inline float number_or_lowest(float x) {
    return x == x ? x : -INFINITY;
}

// Keys grow as values fall, then as indices grow: no two are equal, so sorting them needs no rule for ties.
inline uint64_t key_of(float value, int64_t index) {
    const uint32_t bits = bits_from_float(number_or_lowest(value) + 0.0f);  // +0: -0 and 0 are equal
    const uint32_t falling = (bits >> 31) != 0 ? bits : bits ^ 0x7fffffff;
    return (static_cast<uint64_t>(falling) << 32) | static_cast<uint64_t>(index);
}

inline int64_t index_of(uint64_t key) {
    return static_cast<int64_t>(key & 0xffffffff);
}

// Largest of a group, or the sum of its two largest.
float group_score(const float* choice, int64_t size, bool two) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < size; i++) {
        const float value = number_or_lowest(choice[i]);
        second = value > first ? first : at_least(value, second);
        first = at_least(value, first);
    }
    return two ? first + second : first;
}

// Makes the keys of the experts that may be chosen; returns their number.
int64_t candidate_keys(const RouteArgs& args, const float* choice, const Scratch& scratch) {
    const int64_t size = args.experts / args.groups;
    int64_t kept = 1;
    scratch.groups[0] = 0;
    if (args.groups > 1) {
        kept = args.topk_groups;
        for (int64_t g = 0; g < args.groups; g++)
            scratch.groups[g] = key_of(group_score(choice + g * size, size, args.bias != nullptr), g);
        std::partial_sort(scratch.groups, scratch.groups + kept, scratch.groups + args.groups);
    }
    int64_t count = 0;
    for (int64_t g = 0; g < kept; g++) {
        const int64_t first = index_of(scratch.groups[g]) * size;
        for (int64_t e = first; e < first + size; e++) scratch.keys[count++] = key_of(choice[e], e);
    }
    return count;
}

bool has_nan(const float* values, int64_t n) {
    bool found = false;
    for (int64_t i = 0; i < n; i++) found |= values[i] != values[i];
    return found;
}

// Chosen numerators to weights. `total` divides them unless they are renormalized.
void finish_weights(const RouteArgs& args, float total, float* weights) {
    if (args.renormalize) {
        total = weights[0];
        for (int64_t k = 1; k < args.top_k; k++) total += weights[k];
    }
    for (int64_t k = 0; k < args.top_k; k++) weights[k] = weights[k] / nonzero(total) * args.scale;
}

void weigh_given(const RouteArgs& args, const float* logits, const int32_t* given, int32_t* ids, float* weights) {
    for (int64_t k = 0; k < args.top_k; k++) {
        ids[k] = given[k];
        weights[k] = logits[given[k] < 0 ? 0 : given[k]];
    }
    score_values(args.score, weights, args.top_k, 0.0f, weights);
    for (int64_t k = 0; k < args.top_k; k++) weights[k] = given[k] < 0 ? 0.0f : weights[k];
    finish_weights(args, 1.0f, weights);
}

void choose_and_weigh(const RouteArgs& args, const float* logits, const Scratch& scratch, int32_t* ids,
                      float* weights) {
    const bool softmax = args.score == Score::softmax;
    const float shift = softmax ? softmax_shift(logits, args.experts) : 0.0f;
    const float* choice = logits;
    float total = 1.0f;
    if (args.bias != nullptr || (softmax && !args.renormalize)) {
        score_values(args.score, logits, args.experts, shift, scratch.values);
        if (softmax) total = halving_sum(scratch.values, args.experts, scratch.partial);
    }
    if (args.bias != nullptr) {
        for (int64_t e = 0; e < args.experts; e++)
            scratch.partial[e] = scratch.values[e] / nonzero(total) + args.bias[e];
        choice = scratch.partial;
    }
    const int64_t count = candidate_keys(args, choice, scratch);
    std::partial_sort(scratch.keys, scratch.keys + args.top_k, scratch.keys + count);
    for (int64_t k = 0; k < args.top_k; k++) {
        ids[k] = static_cast<int32_t>(index_of(scratch.keys[k]));
        weights[k] = logits[ids[k]];
    }
    score_values(args.score, weights, args.top_k, shift, weights);
    finish_weights(args, total, weights);
    if (has_nan(choice, args.experts)) std::fill(weights, weights + args.top_k, NAN);
}

}  // namespace

int64_t route_workspace_bytes(const RouteArgs& args, int64_t threads) {
    return Scratch::bytes(args) * std::max<int64_t>(threads, 1);
}

void route(const Kernels& kernels, const RouteArgs& args, void* workspace, const Threads& threads) {
    const int64_t tasks = (args.tokens + kTokensOfTask - 1) / kTokensOfTask;
    const auto* rows = static_cast<const char*>(args.logits);
    parallel_tasks(threads, tasks, args.tokens * args.experts, [&](int64_t thread, int64_t task) {
        const Scratch scratch(args, static_cast<char*>(workspace) + thread * Scratch::bytes(args));
        const int64_t end = std::min(args.tokens, (task + 1) * kTokensOfTask);
        for (int64_t t = task * kTokensOfTask; t < end; t++) {
            const char* row = rows + t * args.experts * dtype_bytes(args.dtype);
            const int64_t at = t * args.top_k;
            kernels.to_float(row, args.dtype, scratch.logits, args.experts);
            if (args.given != nullptr)
                weigh_given(args, scratch.logits, args.given + at, args.ids + at, args.weights + at);
            else
                choose_and_weigh(args, scratch.logits, scratch, args.ids + at, args.weights + at);
        }
    });
}

}  // namespace mxfp4::cpu
