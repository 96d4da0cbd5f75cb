// PTX ISA: wgmma.mma_async m64nNk16 for N = 8, 16, 32, both operands in shared memory. sm_90a.
//
// A is the wide side: 64 KV rows (K-major) or, with TRANS_A, 64 value columns (MN-major). B is the few heads, K-major.
// Accumulators: c[4 j + 2 i + k] is row 16 w + g + 8 i, column 8 j + 2 t + k of warp w, lane 4 g + t.
#pragma once
#include "ptx/wgmma.cuh"

// 64 x 8 = or += A . B^T over 16 of k. FIRST: what was in c is not read, so that the compiler sees no dependence on it.
template <bool TRANS_A, bool FIRST>
__device__ __forceinline__ void wgmma_few(float (&c)[4], uint64_t a, uint64_t b) {
    if constexpr (FIRST) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, "
            "%4, %5, 0, 1, 1, %6, 0;"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
            : "l"(a), "l"(b), "n"(TRANS_A));
    } else {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, "
            "%4, %5, 1, 1, 1, %6, 0;"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "l"(a), "l"(b), "n"(TRANS_A));
    }
}

// 64 x 16 = or += A . B^T over 16 of k. FIRST: what was in c is not read, so that the compiler sees no dependence on it.
template <bool TRANS_A, bool FIRST>
__device__ __forceinline__ void wgmma_few(float (&c)[8], uint64_t a, uint64_t b) {
    if constexpr (FIRST) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
            "%8, %9, 0, 1, 1, %10, 0;"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]), "=f"(c[4]), "=f"(c[5]), "=f"(c[6]), "=f"(c[7])
            : "l"(a), "l"(b), "n"(TRANS_A));
    } else {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
            "%8, %9, 1, 1, 1, %10, 0;"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
            : "l"(a), "l"(b), "n"(TRANS_A));
    }
}

// 64 x 32 = or += A . B^T over 16 of k. FIRST: what was in c is not read, so that the compiler sees no dependence on it.
template <bool TRANS_A, bool FIRST>
__device__ __forceinline__ void wgmma_few(float (&c)[16], uint64_t a, uint64_t b) {
    if constexpr (FIRST) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
            "%16, %17, 0, 1, 1, %18, 0;"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]), "=f"(c[4]), "=f"(c[5]), "=f"(c[6]), "=f"(c[7]),
              "=f"(c[8]), "=f"(c[9]), "=f"(c[10]), "=f"(c[11]), "=f"(c[12]), "=f"(c[13]), "=f"(c[14]), "=f"(c[15])
            : "l"(a), "l"(b), "n"(TRANS_A));
    } else {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
            "%16, %17, 1, 1, 1, %18, 0;"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
              "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
            : "l"(a), "l"(b), "n"(TRANS_A));
    }
}
