// PTX ISA: mma.sync.aligned.m16n8k16 on bfloat16 or float16 (sm_80) and .m16n8k32 on e4m3 and e5m2 (sm_89), with
// float32 accumulators.
//
// Fragments of a warp, lane = 4 * g + t:
//   A (16 x 16): a[0] row g, columns 2t 2t+1; a[1] row g + 8; a[2], a[3] the same rows, 8 columns further
//   B (16 x 8):  b[0] rows 2t 2t+1, column g; b[1] 8 rows further
//   C (16 x 8):  c[0] c[1] row g, columns 2t 2t+1; c[2] c[3] row g + 8
// With bytes a register holds four values of k instead of two.
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Types of bytes.
enum class Fp8 { E4M3, E5M2 };

#define MMA_M16N8K32(types)                                       \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." types   \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "   \
                 "{%0,%1,%2,%3};"                                 \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <Fp8 A, Fp8 B>
__device__ __forceinline__ void mma_m16n8k32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (A == Fp8::E4M3 && B == Fp8::E4M3) {
        MMA_M16N8K32("e4m3.e4m3");
    } else if constexpr (A == Fp8::E4M3) {
        MMA_M16N8K32("e4m3.e5m2");
    } else if constexpr (B == Fp8::E4M3) {
        MMA_M16N8K32("e5m2.e4m3");
    } else {
        MMA_M16N8K32("e5m2.e5m2");
    }
}
#undef MMA_M16N8K32
