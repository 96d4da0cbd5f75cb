// NVFP4: e2m1 under an e4m3 scale each 16 values, to the bit as the formats' writers compute them. Constants of the layout:
// cupy_mla/layouts.py.
#pragma once
#include "rows/e2m1.cuh"
#include "rows/quantize.cuh"

constexpr uint32_t E4M3_NAN = 0x7f, E4M3_LARGEST = 0x7e;

__device__ __forceinline__ float e4m3_to_float(uint32_t byte) {
    float v[4];
    e4m3x4_to_float(byte & 0xff, v);
    return v[0];
}

// The scale of values of which the largest magnitude is the bf16 `amax`: amax / 6 as e4m3, the nearest one, or `up` the
// next that is not below. NaN of NaN and infinity.
__device__ __forceinline__ uint32_t nvfp4_scale(uint32_t amax, bool up) {
    if (amax >= 0x7f80) return E4M3_NAN;
    const float sixth = divide_by_constant(bf16_low(amax), 6.0f),
                ratio = SCALES_FLOORED ? fmaxf(sixth, 0x1p-9f) : sixth;
    const uint32_t scale = float_to_e4m3x4(ratio, 0.0f, 0.0f, 0.0f) & 0xff;
    return scale + (up && scale < E4M3_LARGEST && e4m3_to_float(scale) < ratio);
}

// Two quotients as codes in the lowest bits of two halves, as e2m1x2 of mxfp4.cuh has them, in f16. A quotient of a bf16 and
// an e4m3 is halfway between two codes, which f16 holds, or 2^-9 of itself away from there. So its last bits do not matter.
__device__ __forceinline__ uint32_t e2m1x2_of_quotients(float x, float y) {
    const uint32_t q = pack_f16x2(x, y), magnitude = q & 0x7fff7fff;
    const uint32_t halves = add_f16x2(magnitude, 0x60006000);             // 512, and the code
    const uint32_t ones = add_f16x2(magnitude, 0x64006400) - 0x03fe03fe;  // 1024, and two less than the code
    const uint32_t twos = add_f16x2(magnitude, 0x68006800) - 0x07fc07fc;  // 2048, and four less
    // Positive numbers have the order of their bits, as bf16 as well, of which these are finite ones.
    const uint32_t least = min_bf16x2(min_bf16x2(halves, ones), min_bf16x2(twos, 0x60076007));
    return (least & 0x00070007) | (q >> 12 & 0x00080008);
}

// Eight bf16 of a tile as codes under the tile's scale; zeros under NaN. DIVIDED: codes of quotients; else of products with
// the scale's rounded inverse.
__device__ __forceinline__ uint32_t quantize_nvfp4_8(const Vec16& x, uint32_t scale) {
    const float number = e4m3_to_float(scale), inverse = scale == 0 ? 0.0f : divide_exactly(1.0f, number);
    float v[CHUNK];
    widen_8(x, v);
    uint32_t codes = 0;
    if constexpr (DIVIDED) {
        uint32_t two[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) two[i] = e2m1x2_of_quotients(v[2 * i] * inverse, v[2 * i + 1] * inverse);
        codes = join_codes(two);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) codes |= float_to_e2m1(v[i] * inverse) << 4 * i;
    }
    return scale == E4M3_NAN ? 0 : codes;
}

// Eight codes times their scale, to eight bf16, which is exact; zeros under a scale of 0. The upper bytes of the magnitudes as bf16, and
// the lower ones, are looked up by __byte_perm.
__device__ __forceinline__ Vec16 dequantize_nvfp4_8(uint32_t codes, float scale) {
    if (is_zero(scale)) codes = 0, scale = 0.0f;
    const uint32_t select = codes & 0x77777777,
                   shifted = codes << 4;  // signs of even codes in the bytes' highest bits
    const uint32_t signs[2] = {__byte_perm(shifted, codes, 0x5140), __byte_perm(shifted, codes, 0x7362)};
    const uint32_t factor = pack_bf16x2(scale, scale), minus_0 = 0x80008000u;
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t four = select >> 16 * i;
        const uint32_t upper = __byte_perm(0x3f3f3f00u, 0x40404040u, four) | (signs[i] & 0x80808080u);
        const uint32_t lower = __byte_perm(0xc0800000u, 0xc0804000u, four);
        v[2 * i] = fma_bf16x2(__byte_perm(lower, upper, 0x5140), factor, minus_0);
        v[2 * i + 1] = fma_bf16x2(__byte_perm(lower, upper, 0x7362), factor, minus_0);
    }
    return {v[0], v[1], v[2], v[3]};
}
