// Splits a row into integers; see IntRow in kernels.h. In an anonymous namespace; see the note on weak symbols in
// format.h.
//
// A bf16 value has 8 significant bits, so that with a unit 14 (22) exponents below the largest of a block, every
// element down to 7 (15) exponents below it is an integer that two (three) signed bytes hold, except the few close to
// 2^15 (2^23) and some further down that end in zeros. Nothing is rounded: what does not fit becomes a residual.
#pragma once

#include <math.h>

#include "kernels.h"

namespace mxfp4::cpu {
namespace {

constexpr uint32_t kLargestInt = 0x71800000;   // 2^100 and up: products of partial sums may overflow
constexpr uint32_t kSmallestInt = 0x0d800000;  // below 2^-100, factors would be subnormal
constexpr int kTwoPlaneShare = 32;             // more residuals than 1 of 32 cost more than a third plane

inline uint32_t largest_bits(const float* x) {
    uint32_t largest = 0;
    for (int i = 0; i < kBlock; i++) {
        const uint32_t magnitude = bits_from_float(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// Which offset a plane belongs to, and how often it counts there.
constexpr int offset_of(int planes, int p) {
    return p > planes - 3;
}

constexpr int32_t offset_factor(int planes, int p) {
    return p == planes - 2 ? -12 * 256 : -12;
}

// Integers to planes and offsets.
struct PackPlain {
    template <int planes>
    static void pack(const int32_t* integers, IntBlock* block) {
        int32_t q[kBlock];
        memcpy(q, integers, sizeof q);
        block->offset[0] = block->offset[1] = 0;
        for (int p = planes - 1; p >= 0; p--) {
            int8_t bytes[kBlock];
            for (int i = 0; i < kBlock; i++) {
                bytes[i] = static_cast<int8_t>(q[i]);
                q[i] = (q[i] - bytes[i]) >> 8;
                block->offset[offset_of(planes, p)] += offset_factor(planes, p) * bytes[i];
            }
            for (int i = 0; i < kBlock; i++) block->planes[p][i] = bytes[i / kStepK * kStepK + kIntOrder[i % kStepK]];
        }
    }
};

// One block; false when its range is too extreme. missing[i] becomes -1 where x[i] is left out, else 0.
template <int planes, class Pack>
inline bool split_block(const float* x, IntBlock* block, int32_t* missing) {
    constexpr int kUnit = planes * 8 - 2;                       // exponents from the largest element to the unit
    constexpr int32_t kMost = planes == 2 ? 0x7f7f : 0x7f7f7f;  // all planes at 127
    const uint32_t largest = largest_bits(x);
    if (largest >= kLargestInt || (largest != 0 && largest < kSmallestInt)) return false;
    const uint32_t exponent = largest >> 23;
    const float inverse = largest == 0 ? 0.0f : float_from_bits((254 + kUnit - exponent) << 23);
    block->factor = largest == 0 ? 0.0f : float_from_bits((exponent - kUnit - 1) << 23);
    int32_t q[kBlock];
    for (int i = 0; i < kBlock; i++) {
        const float scaled = x[i] * inverse;
        const int32_t whole = static_cast<int32_t>(scaled);
        missing[i] = -static_cast<int32_t>((static_cast<float>(whole) != scaled) | (whole > kMost));
        q[i] = whole & ~missing[i];
    }
    Pack::template pack<planes>(q, block);
    return true;
}

// False when more than `most` residuals would be needed, or the range is too extreme.
template <int planes, class Pack>
inline bool split_row(int64_t padded_k, int64_t most, IntRow* row) {
    int64_t count = 0;
    for (int64_t k = 0; k < padded_k; k += kBlock) {
        int32_t missing[kBlock], any = 0;
        if (!split_block<planes, Pack>(row->values + k, row->blocks + k / kBlock, missing)) return false;
        for (int i = 0; i < kBlock; i++) any |= missing[i];
        for (int i = 0; any != 0 && i < kBlock; i++) {
            if (missing[i] == 0) continue;
            if (count == most) return false;
            row->residuals[count++] = {static_cast<int32_t>(k + i), row->values[k + i]};
        }
    }
    row->residual_count = count;
    row->planes = planes;
    return true;
}

template <class Pack>
inline void split(int64_t padded_k, IntRow* row) {
    row->planes = 0;
    row->residual_count = 0;
    if (split_row<2, Pack>(padded_k, padded_k / kTwoPlaneShare, row)) return;
    split_row<3, Pack>(padded_k, padded_k / kResidualShare, row);
}

}  // namespace
}  // namespace mxfp4::cpu
