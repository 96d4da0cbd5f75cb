// NVFP4: e2m1 under an e4m3 scale each 16 values, to the bit as the formats' writers compute them. Constants of the
// layout: cupy_mla/layouts.py.
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

// Numbers of e2m1, times 2^-14, are f16 of whose mantissa only the highest bit may be set: 0.5 is subnormal there, too.
// So a code is the f16's bits from bit 9 on, and a number is rounded to a code by integers.
constexpr float E2M1_IN_F16 = 0x1p-14f;

// Two of them, rounded to the nearest code, ties to even codes, which are the highest bits of each half.
__device__ __forceinline__ uint32_t round_to_e2m1x2(uint32_t q) {
    const uint32_t number = min_abs_bf16x2(q, 0x0e000e00);  // at most 6; f16 have the order of bf16
    const uint32_t rounded = number + 0x00ff00ff + (number >> 9 & 0x00010001);
    return (rounded << 3 & 0x70007000) | (number & 0x80008000);
}

// What bf16 of a tile are multiplied by before they are rounded. A quotient of a bf16 and an e4m3 is halfway between
// two codes, which f16 holds, or at least 2^-8 of itself away from there. So last bits do not matter, but for one case:
// unless DIVIDED, what is wanted is the product with the scale's rounded inverse, and where the scale is 1.875 times a
// power of two that product is above 1.25, 2.5 and 5 where the quotient is halfway. A factor of 1 + 2^-10 takes it
// above in f16, and changes no other code.
__device__ __forceinline__ float inverse_of_nvfp4_scale(uint32_t scale) {
    const float inverse = reciprocal_approx(e4m3_to_float(scale) * (1.0f / E2M1_IN_F16));
    const float up = !DIVIDED && (scale & 7) == 7 && scale > 7 ? 1.0f + 0x1p-10f : 1.0f;
    return !SCALES_FLOORED && scale == 0 ? 0.0f : inverse * up;
}

// Eight bf16 of a tile as codes under the tile's scale; zeros under NaN. DIVIDED: codes of quotients; else of products
// with the scale's rounded inverse.
__device__ __forceinline__ uint32_t quantize_nvfp4_8(const Vec16& x, uint32_t scale) {
    const float inverse = inverse_of_nvfp4_scale(scale);
    float v[CHUNK];
    widen_8(x, v);
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes = codes >> 4 | round_to_e2m1x2(pack_f16x2(v[i] * inverse, v[i + 4] * inverse));
    }
    return scale == E4M3_NAN ? 0 : codes;
}

// Eight codes times their scale, to eight bf16, which is exact; zeros under a scale of 0. The upper bytes of the
// magnitudes as bf16, and the lower ones, are looked up by __byte_perm.
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
