// The MXFP4 number format: OCP Microscaling Formats (MX) v1.0, elements E2M1, scale E8M0, blocks of 32.
//
// This is the only file that knows what a code, a scale byte or the nibble order means. It is usable on the host and
// on devices, and it has no state. Functions that answer a float answer its bits where that keeps them constexpr.
//
// Everything is `static inline`: files that include this header are compiled for different instruction sets, and a
// weak symbol compiled for the highest one must never be picked by the linker for all of them.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define MX_HD __host__ __device__
#else
#define MX_HD
#endif

namespace mxfp4 {

constexpr int kBlock = 32;              // elements that share one scale byte
constexpr int kScaleBias = 127;         // scale byte b means 2^(b - 127); b = 0 is 2^-127, never zero
constexpr uint8_t kScaleNaN = 255;      // makes all 32 elements NaN, zero codes too
constexpr int kElementMaxExponent = 2;  // the largest element is 6 = 1.5 * 2^2
constexpr uint32_t kFloatInf = 0x7f800000;
constexpr uint32_t kFloatNaN = 0x7fc00000;

// How the scale byte of a block follows from its largest magnitude. Values are part of the op schema.
enum class ScaleRule : int { even = 0, floor = 1, ceil = 2, rceil = 3 };

MX_HD static inline float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

MX_HD static inline uint32_t bits_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// fp32 bits of an E2M1 code: 0, .5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign.
MX_HD static inline constexpr uint32_t element_bits(uint32_t code) {
    const uint32_t magnitude = code & 7;
    const uint32_t sign = (code & 8) << 28;
    if (magnitude == 0) return sign;
    if (magnitude == 1) return sign | 0x3f000000;  // the one subnormal, 0.5
    return sign | (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22);
}

// fp32 bits of 2^(byte - 127), NaN for 255. Byte 0 is the subnormal 2^-127; the same mantissa bit makes 255 a NaN.
MX_HD static inline constexpr uint32_t scale_bits(uint8_t byte) {
    return (static_cast<uint32_t>(byte) << 23) | (byte == 0 || byte == kScaleNaN ? 0x400000u : 0u);
}

// fp32 bits of 2^(127 - byte), the factor that brings a block to element range. For bytes 0..253.
MX_HD static inline constexpr uint32_t inverse_scale_bits(uint8_t byte) {
    return (254u - byte) << 23;
}

// Scale byte for a block whose largest magnitude has these fp32 bits; 255 when the block holds Inf or NaN.
MX_HD static inline constexpr uint8_t choose_scale(uint32_t amax_bits, ScaleRule rule) {
    if (amax_bits >= kFloatInf) return kScaleNaN;
    const int exponent = static_cast<int>(amax_bits >> 23);
    const uint32_t mantissa = amax_bits & 0x7fffff;
    int byte = exponent - kElementMaxExponent;
    if (rule == ScaleRule::even) byte = static_cast<int>((amax_bits + 0x200000) >> 23) - kElementMaxExponent;
    if (rule == ScaleRule::ceil) byte += mantissa != 0;
    if (rule == ScaleRule::rceil) byte += mantissa > 0x400000;
    return static_cast<uint8_t>(byte < 0 ? 0 : byte);
}

// Nearest E2M1 code of a magnitude, ties to the even code, saturating at 6.
MX_HD static inline constexpr uint32_t nearest_magnitude_code(float magnitude) {
    return (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
           (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
}

// Two codes share a byte; the element of even index lies in the low nibble.
MX_HD static inline constexpr uint8_t pack_codes(uint32_t even, uint32_t odd) {
    return static_cast<uint8_t>(even | (odd << 4));
}

MX_HD static inline constexpr uint32_t code_at(const uint8_t* bytes, int64_t index) {
    return (bytes[index >> 1] >> ((index & 1) * 4)) & 15u;
}

}  // namespace mxfp4
