// PTX ISA: ex2, lg2, sqrt, rcp, div, mul, add, sub, fma, max of float32; min and prmt of uint32; abs, min, max, mul and
// fma of two packed 16-bit numbers.
#pragma once
#include "ptx/types.cuh"

// ex2.approx.ftz, lg2.approx.ftz: base-2 exponential and logarithm.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// sqrt.approx.ftz: with a relative error of at most 2^-23.
__device__ __forceinline__ float sqrt_approx(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// rcp.approx.ftz: 1 / x with a relative error of at most 2^-23.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// div.rn, mul.rn, add.rn, sub.rn: rounded to nearest. They keep subnormals, whatever the compiler's options say.
__device__ __forceinline__ float divide_exactly(float a, float b) {
    float q;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
    return q;
}
__device__ __forceinline__ float multiply_exactly(float a, float b) {
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}

__device__ __forceinline__ float add_exactly(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}
__device__ __forceinline__ float subtract_exactly(float a, float b) {
    float difference;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
    return difference;
}

// max.NaN: the maximum of a number and a NaN is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// a / divisor, computed as a product with the reciprocal that is corrected by the remainder (mul.rn, two fma.rn).
// Keeps subnormals.
__device__ __forceinline__ float divide_by_constant(float a, float divisor) {
    float quotient;
    asm("{\n"
        ".reg .f32 q, rest;\n"
        "mul.rn.f32 q, %1, %2;\n"
        "fma.rn.f32 rest, q, %3, %1;\n"
        "fma.rn.f32 %0, rest, %2, q;\n"
        "}\n"
        : "=f"(quotient)
        : "f"(a), "f"(1.0f / divisor), "f"(-divisor));
    return quotient;
}

// min.u32. If a minimum is used as an index, the compiler computes it in 64 bits, with three instructions instead of
// one.
__device__ __forceinline__ uint32_t min_in_32_bits(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("min.u32 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// prmt.b32: four of the eight bytes of a and b, by the lowest four hexadecimal digits of `select`. They must be at most
// 7. __byte_perm clears their highest bits first, with one more instruction.
__device__ __forceinline__ uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t select) {
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(select));
    return y;
}

// max.u16x2 of sm_90: of two integers in the halves of a word.
__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// Operations on two 16-bit floats in the halves of a word. The maximum of a number and a NaN is the number.
__device__ __forceinline__ uint32_t abs_bf16x2(uint32_t x) {
    uint32_t y;
    asm("abs.bf16x2 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ uint32_t min_bf16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// max.NaN: the maximum of a number and a NaN is NaN.
__device__ __forceinline__ uint32_t max_or_nan_bf16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// The larger magnitude, max(|a|, |b|), with the sign of a xor b.
__device__ __forceinline__ uint32_t max_abs_bf16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// The smaller magnitude with the sign of a, for b not negative.
__device__ __forceinline__ uint32_t min_abs_bf16x2(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 860
    uint32_t y;
    asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#else
    return min_bf16x2(abs_bf16x2(a), b) | (a & 0x80008000u);
#endif
}
__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// fma.rn.bf16x2: a * b + c, rounded once. Subnormals stay.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}
__device__ __forceinline__ uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// The larger half, as bits. Positive floats compare as their bits do.
__device__ __forceinline__ uint32_t larger_half(uint32_t two) { return max(two & 0xffff, two >> 16); }
