// NVFP4: e2m1 values, with an e4m3 scale for each 16. Results have the same bits as those of the formats' own writers.
// Constants of the layout: cupy_mla/layouts.py.
#pragma once
#include "rows/e2m1.cuh"
#include "rows/quantize.cuh"

constexpr uint32_t E4M3_NAN = 0x7f, E4M3_LARGEST = 0x7e;

__device__ __forceinline__ float e4m3_to_float(uint32_t byte) {
    float v[4];
    e4m3x4_to_float(byte & 0xff, v);
    return v[0];
}

// The scale of values whose largest magnitude is the bf16 `amax`: amax / 6, rounded to the nearest e4m3, or if `up` to
// the next one that is not smaller. NaN for NaN and infinity.
__device__ __forceinline__ uint32_t nvfp4_scale(uint32_t amax, bool up) {
    if (amax >= 0x7f80) return E4M3_NAN;
    const float sixth = divide_by_constant(bf16_low(amax), 6.0f),
                ratio = SCALES_FLOORED ? fmaxf(sixth, 0x1p-9f) : sixth;
    const uint32_t scale = float_to_e4m3x4(ratio, 0.0f, 0.0f, 0.0f) & 0xff;
    return scale + (up && scale < E4M3_LARGEST && e4m3_to_float(scale) < ratio);
}

// An e2m1 value times 2^-14 is an f16 in whose mantissa only the highest bit may be set; 0.5 is subnormal there, too.
// So the bits from bit 9 on are the code, and integer arithmetic rounds a number to a code.
constexpr float E2M1_IN_F16 = 0x1p-14f;

// Two such f16, rounded to the nearest code, ties to even. The codes are the highest bits of each half.
__device__ __forceinline__ uint32_t round_to_e2m1x2(uint32_t q) {
    const uint32_t number = min_abs_bf16x2(q, 0x0e000e00);  // at most 6; f16 compare as bf16 do
    const uint32_t rounded = number + 0x00ff00ff + (number >> 9 & 0x00010001);
    return (rounded << 3 & 0x70007000) | (number & 0x80008000);
}

// The factor of a tile's bf16 before they are rounded to codes. A bf16 divided by an e4m3 is either halfway between
// two codes, and f16 holds it exactly, or it is away from there by at least 2^-8 of itself. So errors in the last bits
// do not matter, with one exception. Unless DIVIDED, the wanted code is that of the product with the scale's rounded
// inverse. If the scale is 1.875 times a power of two, that product is above 1.25, 2.5 and 5 where the quotient is
// exactly halfway. A factor of 1 + 2^-10 moves the f16 above, too, and changes no other code.
__device__ __forceinline__ float inverse_of_nvfp4_scale(uint32_t scale) {
    const float inverse = reciprocal_approx(e4m3_to_float(scale) * (1.0f / E2M1_IN_F16));
    const float up = !DIVIDED && (scale & 7) == 7 && scale > 7 ? 1.0f + 0x1p-10f : 1.0f;
    return !SCALES_FLOORED && scale == 0 ? 0.0f : inverse * up;
}

// Eight bf16 of a tile as codes under the tile's scale; 0 if the scale is NaN. DIVIDED: the codes of quotients; else
// of products with the scale's rounded inverse.
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

// Eight codes times their scale, as eight bf16, which is exact. Under a scale of 0 all are 0. The upper and the lower
// bytes of the magnitudes' bf16 are looked up by __byte_perm.
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
