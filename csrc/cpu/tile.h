// Geometry of the packed weight layout "native_cpu.tile32.v1".
//
//   tile        = 32 output rows x all of k, as k/64 consecutive superblocks
//   superblock  = 64 k of a tile, 1088 bytes:
//                   64 scale bytes   [k/32 (2)][row (32)]
//                   16 lines of 64 B [step (8)][half (2)]; a step is 8 k, half h holds rows 16h .. 16h+15
//   line        = 16 dwords, dword lane = row; nibble n of a dword (bits 4n..4n+3) holds k = kNibbleToK[n] of the step
//
// The nibble order serves three decoders: shifted by 4j, the low and high word of a dword hold k = 2j and 2j+1 (bf16
// pairs for AVX512-BF16); shifted by 4n, a dword holds one code (AVX-512 fp32); and the even nibbles 0,2,4,6 hold
// k = 0,4,1,5, so that byte decoding leaves neighbouring k in neighbouring lanes (AVX2).
#pragma once

#include <stdint.h>

namespace mxfp4::cpu {

constexpr int kTileRows = 32;
constexpr int kSuperK = 64;
constexpr int kScaleBytes = 64;
constexpr int kLineBytes = 64;
constexpr int kStepK = 8;
constexpr int kStepBytes = 2 * kLineBytes;
constexpr int64_t kSuperBytes = kScaleBytes + 16 * kLineBytes;

constexpr int kNibbleToK[8] = {0, 2, 4, 6, 1, 3, 5, 7};
// k of the low nibbles of the four bytes of a dword, then of the high nibbles.
constexpr int kIntOrder[kStepK] = {0, 4, 1, 5, 2, 6, 3, 7};

static inline const uint8_t* scale_of(const uint8_t* super, int block, int row) {
    return super + block * kTileRows + row;
}

static inline const uint8_t* line_of(const uint8_t* super, int step, int half) {
    return super + kScaleBytes + step * kStepBytes + half * kLineBytes;
}

// Calls body(begin, count) for the parts of 0 .. n - 1, as few as hold at most `most` each, and of even size.
template <class Body>
static inline void for_even_parts(int64_t n, int64_t most, Body body) {
    int64_t begin = 0;
    for (int64_t parts = (n + most - 1) / most; parts > 0; parts--) {
        const int64_t count = (n - begin + parts - 1) / parts;
        body(begin, count);
        begin += count;
    }
}

}  // namespace mxfp4::cpu
