// Activations of the expert MLP on a tile of fp32 values, written so that compilers vectorise them for the ISA of the
// including file: no branches and no library calls in the exp-based ones. gelu and situ use erf and tanh of libm.
//
// Everything sits in an anonymous namespace; see the note on weak symbols in format.h.
#pragma once

#include <math.h>

#include "kernels.h"

namespace mxfp4::cpu {
namespace {

// NaN passes through both: the comparison is false, so x is kept.
inline float at_most(float x, float bound) {
    return x > bound ? bound : x;
}

inline float at_least(float x, float bound) {
    return x < bound ? bound : x;
}

inline float clamp_symmetric(float x, float bound) {
    return at_least(at_most(x, bound), -bound);
}

// e^x with a relative error below 2e-7 over the whole range, subnormal results included.
// x = n ln 2 + r; the Taylor polynomial of degree 7 on |r| <= ln2 / 2 is below half an ulp; 2^n is applied in two
// halves because n reaches from -150 to 128.
inline float exponential(float x) {
    const float clamped = at_least(at_most(x, 89.0f), -105.0f);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    const float shifted = clamped * 1.44269504088896341f + magic;
    const float n = shifted - magic;
    const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    const int32_t exponent = static_cast<int32_t>(bits_from_float(shifted) - bits_from_float(magic));
    const int32_t half = exponent >> 1;
    const float low = float_from_bits(static_cast<uint32_t>(half + 127) << 23);
    const float high = float_from_bits(static_cast<uint32_t>(exponent - half + 127) << 23);
    return p * low * high;
}

inline float sigmoid(float x) {
    return 1.0f / (1.0f + exponential(-x));
}

inline float silu(float x) {
    return x * sigmoid(x);
}

inline float gelu(float x) {
    return 0.5f * x * (1.0f + erff(x * 0.707106781186547524f));
}

inline float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.797884560802865356f * (x + 0.044715f * x * x * x)));
}

template <class Function>
inline void gated(float* tile, int64_t m, Function function) {
    for (int64_t i = 0; i < m; i++) {
        float* row = tile + i * kTileRows;
        for (int c = 0; c < 16; c++) row[c] = function(row[c], row[c + 16]);
    }
}

template <class Function>
inline void unary(float* tile, int64_t m, Function function) {
    for (int64_t i = 0; i < m * kTileRows; i++) tile[i] = function(tile[i]);
}

inline void situ(const ActivationParams& params, float* tile, int64_t m) {
    const float alpha = params.alpha, beta = params.beta;
    const bool bounded = beta <= 3.4028234663852886e38f;
    gated(tile, m, [=](float g, float u) {
        const float gate = alpha * tanhf(g / alpha) * sigmoid(g);
        return gate * (bounded ? beta * tanhf(u / beta) : u);
    });
}

inline void activate_tile(const ActivationParams& params, float* tile, int64_t m) {
    const float alpha = params.alpha, beta = params.beta, limit = params.limit;
    switch (params.activation) {
        case Activation::silu:
            return gated(tile, m,
                         [=](float g, float u) { return silu(at_most(g, limit)) * clamp_symmetric(u, limit); });
        case Activation::swigluoai:
            return gated(tile, m, [=](float g, float u) {
                const float gate = at_most(g, limit);
                return gate * sigmoid(alpha * gate) * (clamp_symmetric(u, limit) + beta);
            });
        case Activation::swiglustep:
            return gated(tile, m,
                         [=](float g, float u) { return at_most(silu(g), limit) * clamp_symmetric(u, limit); });
        case Activation::situ:
            return situ(params, tile, m);
        case Activation::gelu:
            return gated(tile, m, [](float g, float u) { return gelu(g) * u; });
        case Activation::gelu_tanh:
            return gated(tile, m, [](float g, float u) { return gelu_tanh(g) * u; });
        case Activation::relu2_no_mul:
            return unary(tile, m, [](float x) { return at_least(x, 0.0f) * at_least(x, 0.0f); });
        case Activation::silu_no_mul:
            return unary(tile, m, [](float x) { return silu(x); });
        case Activation::gelu_no_mul:
            return unary(tile, m, [](float x) { return gelu(x); });
        case Activation::gelu_tanh_no_mul:
            return unary(tile, m, [](float x) { return gelu_tanh(x); });
    }
}

}  // namespace
}  // namespace mxfp4::cpu
