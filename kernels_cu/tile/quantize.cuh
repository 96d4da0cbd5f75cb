// Values to e4m3 under a scale, and the scale itself, as the formats' writers compute them: to the bit.
#pragma once
#include "ptx/convert.cuh"

constexpr float E4M3_MAX = 448.0f;
constexpr float AMAX_FLOOR = 1e-4f;  // keeps power-of-two scales from vanishing with a tile's values

// div.rn.f32, which flushes nothing to zero whatever the compiler's options.
__device__ __forceinline__ float divide_exactly(float a, float b) {
    float q;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
    return q;
}

// x / scale, rounded as a division rounds: a product with the reciprocal, mended once by its remainder, which is exact in
// a fused multiply-add. Right for every bf16 x and every scale that is a bf16 / 448 or a power of two (there are 2^14 pairs
// of mantissas, all tried), as long as the scale is finite and at least AMAX_FLOOR / 448: quotients that would lose
// bits to underflow are then far below what e4m3 can hold. The sign of a zero needs looking after.
__device__ __forceinline__ float divide_by_scale(float x, float scale, float reciprocal) {
    const float q = x * reciprocal;
    return copysignf(fmaf(fmaf(-q, scale, x), reciprocal, q), x);
}

// The smallest power of two that is not below x; x is normal.
__device__ __forceinline__ float power_of_two_from(float x) {
    const uint32_t bits = __float_as_uint(x);
    return __uint_as_float((bits + 0x7fffffu) & 0xff800000u);
}

// Eight bf16 to float32.
__device__ __forceinline__ void widen_8(const Vec16& v, float (&to)[8]) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = bf16_low(w[i]);
        to[2 * i + 1] = bf16_high(w[i]);
    }
}

// Eight e4m3 bytes, in order.
__device__ __forceinline__ Vec8 pack_e4m3_8(const float (&v)[8]) {
    uint32_t w[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i / 4] |= float_to_e4m3(v[i]) << (8 * (i % 4));
    return {w[0], w[1]};
}
