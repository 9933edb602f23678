// Every kernel in plain C++: the specification that the other tables are tested against, and the fallback for CPUs
// without one. Compiled with -ffp-contract=off, so that what is written here is what is rounded.
#include "activation.h"
#include "int_row.h"
#include "kernels.h"

namespace mxfp4::cpu {
namespace {

float float_from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
    if (exponent == 31) return float_from_bits(sign | kFloatInf | (mantissa != 0 ? 0x400000 | mantissa << 13 : 0));
    if (exponent != 0) return float_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return float_from_bits(sign | bits_from_float(magnitude));
}

uint16_t half_from_float(float value) {
    const uint32_t bits = bits_from_float(value), magnitude = bits & 0x7fffffff;
    const uint32_t sign = (bits >> 16) & 0x8000;
    if (magnitude > kFloatInf) return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
    if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to 65536 or more
    if (magnitude < 0x38800000) {  // subnormal in fp16: adding 0.5 leaves the value in units of 2^-24, rounded
        return static_cast<uint16_t>(sign | (bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000));
    }
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23);
    return static_cast<uint16_t>(sign | (rounded >> 13));
}

uint16_t bf16_from_float(float value) {
    const uint32_t bits = bits_from_float(value);
    if ((bits & 0x7fffffff) > kFloatInf) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
T load(const void* src, int64_t i) {
    T value;
    memcpy(&value, static_cast<const char*>(src) + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}

template <class T>
void store(void* dst, int64_t i, T value) {
    memcpy(static_cast<char*>(dst) + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

void to_float(const void* src, Dtype dtype, float* dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        switch (dtype) {
            case Dtype::f32:
                dst[i] = load<float>(src, i);
                break;
            case Dtype::bf16:
                dst[i] = float_from_bits(static_cast<uint32_t>(load<uint16_t>(src, i)) << 16);
                break;
            case Dtype::f16:
                dst[i] = float_from_half(load<uint16_t>(src, i));
                break;
            case Dtype::f64:
                dst[i] = static_cast<float>(load<double>(src, i));
                break;
        }
    }
}

void from_float(const float* src, Dtype dtype, void* dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (dtype == Dtype::f32) store(dst, i, src[i]);
        if (dtype == Dtype::bf16) store(dst, i, bf16_from_float(src[i]));
        if (dtype == Dtype::f16) store(dst, i, half_from_float(src[i]));
    }
}

void quant(const float* x, int64_t n, ScaleRule rule, uint8_t* blocks, uint8_t* scales) {
    for (int64_t b = 0; b < n / kBlock; b++, x += kBlock, blocks += kBlock / 2) {
        uint32_t amax = 0;
        for (int i = 0; i < kBlock; i++) {
            const uint32_t magnitude = bits_from_float(x[i]) & 0x7fffffff;
            if (magnitude > amax) amax = magnitude;
        }
        scales[b] = choose_scale(amax, rule);
        memset(blocks, 0, kBlock / 2);
        if (scales[b] == kScaleNaN) continue;
        const float factor = float_from_bits(inverse_scale_bits(scales[b]));
        uint32_t codes[kBlock];
        for (int i = 0; i < kBlock; i++) {
            const uint32_t bits = bits_from_float(x[i]);
            const float magnitude = float_from_bits(bits & 0x7fffffff) * factor;
            codes[i] = nearest_magnitude_code(magnitude) | (bits >> 31) << 3;
        }
        for (int i = 0; i < kBlock / 2; i++) blocks[i] = pack_codes(codes[2 * i], codes[2 * i + 1]);
    }
}

void dequant(const uint8_t* blocks, const uint8_t* scales, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i++) {
        const float scale = float_from_bits(scale_bits(scales[i / kBlock]));
        out[i] = float_from_bits(element_bits(code_at(blocks, i))) * scale;
    }
}

// w[k][row] of one superblock
void decode_superblock(const uint8_t* super, float (*w)[kTileRows]) {
    for (int k = 0; k < kSuperK; k++) {
        const int step = k / kStepK;
        int nibble = 0;
        while (kNibbleToK[nibble] != k % kStepK) nibble++;
        for (int row = 0; row < kTileRows; row++) {
            const uint8_t* dword = line_of(super, step, row / 16) + row % 16 * 4;
            const float scale = float_from_bits(scale_bits(*scale_of(super, k / kBlock, row)));
            w[k][row] = float_from_bits(element_bits(code_at(dword, nibble))) * scale;
        }
    }
}

void tile_dot(const uint8_t* tile, int64_t supers, const float* const* rows, int64_t m, void*, float* acc) {
    float w[kSuperK][kTileRows];
    for (int64_t s = 0; s < supers; s++, tile += kSuperBytes) {
        decode_superblock(tile, w);
        for (int64_t i = 0; i < m; i++) {
            const float* x = rows[i] + s * kSuperK;
            float* sum = acc + i * kTileRows;
            for (int k = 0; k < kSuperK; k++) {
                for (int row = 0; row < kTileRows; row++) sum[row] += w[k][row] * x[k];
            }
        }
    }
}

void quantize_row(int64_t padded_k, IntRow* row) {
    split<PackPlain>(padded_k, row);
}

// The integers of a block, in the order of k.
void join_planes(const IntBlock& block, int planes, int32_t* q) {
    for (int i = 0; i < kBlock; i++) {
        int32_t value = 0;
        for (int p = 0; p < planes; p++) value = value * 256 + block.planes[p][i];
        q[i / kStepK * kStepK + kIntOrder[i % kStepK]] = value;
    }
}

// Puts the row together again, which makes its very values, and multiplies it as tile_dot does.
void dot_int_tile(const uint8_t* tile, int64_t supers, const IntRow& row, float* acc) {
    float w[kSuperK][kTileRows];
    int32_t q[kBlock] = {};
    int64_t residual = 0;
    for (int64_t s = 0; s < supers; s++) {
        decode_superblock(tile + s * kSuperBytes, w);
        for (int k = 0; k < kSuperK; k++) {
            const IntBlock& block = row.blocks[s * 2 + k / kBlock];
            if (k % kBlock == 0) join_planes(block, row.planes, q);
            float value = static_cast<float>(q[k % kBlock]) * (2 * block.factor);
            const bool missing = residual < row.residual_count && row.residuals[residual].k == s * kSuperK + k;
            if (missing) value = row.residuals[residual++].value;
            for (int r = 0; r < kTileRows; r++) acc[r] += w[k][r] * value;
        }
    }
}

void dot_int(const IntProduct& p) {
    for (int64_t t = 0; t < p.count; t++) {
        const uint8_t* tile = p.tiles + t * p.supers * kSuperBytes;
        for (int64_t i = 0; i < p.m; i++) dot_int_tile(tile, p.supers, *p.rows[i], p.acc[i] + t * p.stride);
    }
}

int range(const float* x, int64_t n, float tiny) {
    int flags = 0;
    for (int64_t i = 0; i < n; i++) {
        const float magnitude = fabsf(x[i]);
        if (magnitude > 0.0f && magnitude < tiny) flags |= kHasTiny;
        if (magnitude > kHuge && magnitude < __builtin_inff()) flags |= kHasHuge;
    }
    return flags;
}

void activate(const ActivationParams& params, float* tile, int64_t m) {
    activate_tile(params, tile, m);
}

void accumulate(float* acc, const float* y, float w, int64_t n) {
    for (int64_t i = 0; i < n; i++) acc[i] += w * y[i];
}

}  // namespace

const Kernels& scalar_kernels() {
    static const Kernels table = [] {
        Kernels k{};  // the optional entries stay null
        k.name = "scalar";
        k.to_float = to_float;
        k.from_float = from_float;
        k.quant = quant;
        k.dequant = dequant;
        k.few = tile_dot;
        k.many = tile_dot;
        k.few_limit = kMaxRows;
        k.quantize_row = quantize_row;
        k.dot_int = dot_int;
        k.int_limit = 1;
        k.range = range;
        k.activate = activate;
        k.accumulate = accumulate;
        return k;
    }();
    return table;
}

}  // namespace mxfp4::cpu
