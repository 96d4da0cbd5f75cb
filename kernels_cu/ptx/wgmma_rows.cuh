// PTX ISA: wgmma.mma_async m64nNk16 for N = 8, 16, 32 with A in registers, float16 or bfloat16. sm_90a.
//
// A is the wide side, 64 rows; B is the few heads, K-major in shared memory. Of A, lane 4 g + t of warp w holds
//   a[0], a[2]: row 16 w + g,     k = 2 t, 2 t + 1 and 2 t + 8, 2 t + 9
//   a[1], a[3]: row 16 w + g + 8, the same k
// Accumulators: c[4 j + 2 i + k] is row 16 w + g + 8 i, column 8 j + 2 t + k.
// The registers of A must stay as they are until the product is waited for.
#pragma once
#include "ptx/wgmma.cuh"

enum class Type { F16, BF16 };

#define WGMMA_ROWS_8(TYPE, FIRST, OUT)                                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " {%0, %1, %2, %3}, "      \
                 "{%4, %5, %6, %7}, %8, " FIRST ", 1, 1, 0;"                                           \
                 : OUT(c[0]), OUT(c[1]), OUT(c[2]), OUT(c[3])                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define WGMMA_ROWS_16(TYPE, FIRST, OUT)                                                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {%0, %1, %2, %3, %4, %5, %6, %7}, " \
                 "{%8, %9, %10, %11}, %12, " FIRST ", 1, 1, 0;"                                        \
                 : OUT(c[0]), OUT(c[1]), OUT(c[2]), OUT(c[3]), OUT(c[4]), OUT(c[5]), OUT(c[6]), OUT(c[7]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define WGMMA_ROWS_32(TYPE, FIRST, OUT)                                                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {%0, %1, %2, %3, %4, %5, %6, %7, " \
                 "%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, " FIRST ", 1, 1, 0;" \
                 : OUT(c[0]), OUT(c[1]), OUT(c[2]), OUT(c[3]), OUT(c[4]), OUT(c[5]), OUT(c[6]), OUT(c[7]), \
                   OUT(c[8]), OUT(c[9]), OUT(c[10]), OUT(c[11]), OUT(c[12]), OUT(c[13]), OUT(c[14]), OUT(c[15]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// 64 x N = or += A . B^T over 16 of k. FIRST: what was in c is not read, so that the compiler sees no dependence on it.
#define WGMMA_ROWS(N)                                                                                  \
    template <Type TYPE, bool FIRST>                                                                   \
    __device__ __forceinline__ void wgmma_rows(float (&c)[N / 2], const uint32_t* a, uint64_t b) {     \
        if constexpr (TYPE == Type::F16) {                                                             \
            if constexpr (FIRST) { WGMMA_ROWS_##N("f16", "0", "=f"); } else { WGMMA_ROWS_##N("f16", "1", "+f"); } \
        } else {                                                                                       \
            if constexpr (FIRST) { WGMMA_ROWS_##N("bf16", "0", "=f"); } else { WGMMA_ROWS_##N("bf16", "1", "+f"); } \
        }                                                                                              \
    }
WGMMA_ROWS(8)
WGMMA_ROWS(16)
WGMMA_ROWS(32)
