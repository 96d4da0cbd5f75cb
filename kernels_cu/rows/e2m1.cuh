// e2m1: codes of four bits, a sign above 0, .5, 1, 1.5, 2, 3, 4, 6. Eight are a word, the first in its lowest bits.
#pragma once
#include "ptx/convert.cuh"
#include "rows/chunk.cuh"

// The largest magnitude of the eight bf16 of LANES neighbouring lanes, as a bf16; NaN if any is.
template <int LANES>
__device__ __forceinline__ uint32_t amax_or_nan(const Vec16& v) {
    uint32_t amax = max_or_nan_bf16x2(max_or_nan_bf16x2(abs_bf16x2(v.x), abs_bf16x2(v.y)),
                                      max_or_nan_bf16x2(abs_bf16x2(v.z), abs_bf16x2(v.w)));
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) amax = max_or_nan_bf16x2(amax, __shfl_xor_sync(~0u, amax, step));
    return larger_half(amax);
}

// The number of a code, of which the lowest four bits count.
__device__ __forceinline__ float e2m1_to_float(uint32_t code) {
    const uint32_t exponent = code >> 1 & 3, fraction = code & 1;
    const float magnitude = exponent == 0 ? 0.5f * fraction : __uint_as_float(exponent + 126 << 23 | fraction << 22);
    return code & 8 ? -magnitude : magnitude;
}

// A float32 as a code, rounded to the nearest, ties to even codes, saturating at 6. A number to which a power of two is
// added is rounded to the unit in the last place of the sum: to halves, ones or twos. Of the three codes that follow the
// least is right, in each of the ranges up to 2, 4 and 6. Minus stays, of zeros too.
__device__ __forceinline__ uint32_t float_to_e2m1(float x) {
    const float magnitude = fminf(fabsf(x), 6.0f);
    const uint32_t halves = __float_as_uint(magnitude + 0x1p22f) & 15;
    const uint32_t ones = (__float_as_uint(magnitude + 0x1p23f) & 15) + 2;
    const uint32_t twos = (__float_as_uint(magnitude + 0x1p24f) & 15) + 4;
    return min(halves, min(ones, twos)) | (__float_as_uint(x) >> 28 & 8);
}

// Eight codes times a scale, to eight bf16. Exact for scales of five bits. The upper bytes of the magnitudes as bf16, and
// the lower ones, are looked up by __byte_perm.
__device__ __forceinline__ Vec16 dequantize_e2m1_8(uint32_t codes, float scale) {
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
