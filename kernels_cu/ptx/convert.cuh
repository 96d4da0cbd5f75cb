// PTX ISA: cvt. Conversions between float32, float16, bfloat16, float8_e4m3fn and UE8M0.
#pragma once
#include "ptx/arithmetic.cuh"
#include "ptx/types.cuh"

// cvt.rn.bf16x2.f32: two float32 to packed bfloat16, round to nearest even; `lo` in the low half.
__device__ __forceinline__ uint32_t pack_bf16x2(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}

// cvt.rn.f16x2.f32: the same to float16; a value that is too large becomes infinite.
__device__ __forceinline__ uint32_t pack_f16x2(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}

// cvt.f32.f16: two packed float16 to float32.
__device__ __forceinline__ float2 f16x2_to_float(uint32_t packed) {
    float2 v;
    asm("{\n"
        ".reg .b16 lo, hi;\n"
        "mov.b32 {lo, hi}, %2;\n"
        "cvt.f32.f16 %0, lo;\n"
        "cvt.f32.f16 %1, hi;\n"
        "}\n"
        : "=f"(v.x), "=f"(v.y)
        : "r"(packed));
    return v;
}

__device__ __forceinline__ float bf16_low(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float bf16_high(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }
__device__ __forceinline__ float bf16_to_float(bf16 v) { return __uint_as_float(uint32_t(v) << 16); }

// Two bfloat16 to two float16.
__device__ __forceinline__ uint32_t bf16x2_to_f16x2(uint32_t packed) {
    return pack_f16x2(bf16_low(packed), bf16_high(packed));
}

// The power of two with a biased exponent, 2^(exponent - 127); and its inverse.
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32_t(exponent) << 23); }
__device__ __forceinline__ float inverse_power_of_two(int exponent) {
    return __uint_as_float(uint32_t(254 - exponent) << 23);
}

// The same power of two as a pair of bfloat16.
__device__ __forceinline__ uint32_t power_of_two_bf16x2(int exponent) { return uint32_t(exponent) * 0x00800080; }

// A UE8M0 byte to the power of two it stands for. 0 is 2^-127, 255 is NaN.
__device__ __forceinline__ float ue8m0_to_float(uint32_t byte) {
    const uint32_t nan = byte == 255 ? 0x7fffffu : 0;  // no branches: eight of them took 300 cycles in portable.cu
    return __uint_as_float(max(byte << 23, 0x00400000u) | nan);
}

// Two of four e4m3 bytes to f16, exact, for GPUs before sm_89. `select` (of prmt) puts the bytes into the upper bytes
// of two halves. s eeee mmm is shifted to the f16 s 0eeee mmm0..., which is 2^8 too small.
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2(uint32_t bytes, uint32_t select) {
    const uint32_t upper = __byte_perm(bytes, 0, select);
    const uint32_t nan = ((upper & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
    const uint32_t small = (upper & 0x80008000u) | (upper & 0x7f007f00u) >> 1;
    return multiply_f16x2(small, 0x5c005c00u) | (nan - (nan >> 6));  // times 256
}

// Four e4m3 bytes to two pairs of f16, exact.
__device__ __forceinline__ void e4m3x4_to_f16x2(uint32_t bytes, uint32_t& first, uint32_t& second) {
#if __CUDA_ARCH__ >= 890
    asm("{\n"
        ".reg .b16 lo, hi;\n"
        "mov.b32 {lo, hi}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, lo;\n"
        "cvt.rn.f16x2.e4m3x2 %1, hi;\n"
        "}\n"
        : "=r"(first), "=r"(second)
        : "r"(bytes));
#else
    first = e4m3x2_to_f16x2(bytes, 0x1404);
    second = e4m3x2_to_f16x2(bytes, 0x3424);
#endif
}

// Four e5m2 bytes, the upper bytes of f16, to two pairs of f16. Volatile: else ptxas moves it to where keys fill the
// registers (logits.cu on sm_86).
__device__ __forceinline__ void e5m2x4_to_f16x2(uint32_t bytes, uint32_t& first, uint32_t& second) {
    asm volatile("prmt.b32 %0, %1, 0, 0x1404;" : "=r"(first) : "r"(bytes));
    asm volatile("prmt.b32 %0, %1, 0, 0x3424;" : "=r"(second) : "r"(bytes));
}

// Four e4m3 bytes to four float32.
__device__ __forceinline__ void e4m3x4_to_float(uint32_t bytes, float (&v)[4]) {
#if __CUDA_ARCH__ >= 890
    // cvt.rn.f16x2.e4m3x2 is exact; so is f16 to f32.
    asm("{\n"
        ".reg .b16 lo, hi, h0, h1, h2, h3;\n"
        ".reg .b32 p, q;\n"
        "mov.b32 {lo, hi}, %4;\n"
        "cvt.rn.f16x2.e4m3x2 p, lo;\n"
        "cvt.rn.f16x2.e4m3x2 q, hi;\n"
        "mov.b32 {h0, h1}, p;\n"
        "mov.b32 {h2, h3}, q;\n"
        "cvt.f32.f16 %0, h0;\n"
        "cvt.f32.f16 %1, h1;\n"
        "cvt.f32.f16 %2, h2;\n"
        "cvt.f32.f16 %3, h3;\n"
        "}\n"
        : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
        : "r"(bytes));
#else
    // There is no conversion instruction before sm_89. s eeee mmm is shifted to the f16 s 0eeee mmm0..., which is 2^8
    // too small; cvt to float32 keeps its subnormals, and one multiplication by 2^8 follows. (Shifted to a float32
    // directly, subnormals would be flushed to zero.)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t b = bytes >> (8 * i);
        const uint16_t h = uint16_t((b & 0x80u) << 8 | (b & 0x7fu) << 7);
        float f;
        asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
        v[i] = (b & 0x7fu) == 0x7fu ? __uint_as_float(0x7fffffffu) : f * 256.0f;
    }
#endif
}

// Float32 to an e4m3 byte in integers, for GPUs before sm_89: round to nearest even, saturating at 448; NaN is 0x7f.
__device__ __forceinline__ uint32_t float_to_e4m3(float x) {
    const uint32_t bits = __float_as_uint(x), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fu;
    const float a = __uint_as_float(magnitude);
    if (a >= 448.0f) return sign | 0x7eu;
    if (a < 0.015625f) {  // below 2^-6, subnormal: multiples of 2^-9; adding 2^14 rounds to them in the last place
        return sign | (__float_as_uint(a + 16384.0f) & 0xfu);
    }
    // Keep 3 of 23 mantissa bits, ties to even, and move the exponent's bias from 127 to 7.
    const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
    return sign | ((rounded >> 20) - (120u << 3));
}

// Four float32 to e4m3 bytes, round to nearest even, saturating at 448; NaN is 0x7f.
__device__ __forceinline__ uint32_t float_to_e4m3x4(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
    uint32_t bytes;
    asm("{\n"
        ".reg .b16 lo, hi;\n"
        "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
        "mov.b32 %0, {lo, hi};\n"
        "}\n"
        : "=r"(bytes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return bytes;
#else
    return float_to_e4m3(a) | float_to_e4m3(b) << 8 | float_to_e4m3(c) << 16 | float_to_e4m3(d) << 24;
#endif
}
