// PTX ISA: wgmma.mma_async with float32 accumulators, A in shared memory or in registers: m64nNk16 on bfloat16 or
// float16, N = 16, 32, 64 or 256, and 8 with A in shared memory; m64nNk32 on e5m2, and on e4m3 with A in shared memory,
// N = 32, 64, 128, 192 or 256; wgmma.fence, .commit_group, .wait_group. sm_90a.
//
// A warpgroup multiplies together. In warp w, lane 4 g + t, accumulator c[4 j + 2 i + k] is row 16 w + g + 8 i, column
// 8 j + 2 t + k. A in registers: each warp holds its 16 rows as fragments of mma.m16n8k16 (mma_sync.cuh).
#pragma once
#include "ptx/registers.cuh"
#include "ptx/types.cuh"

// The descriptor of an operand in shared memory under the 128-byte swizzle. A core matrix is 8 lines of 128 bytes (64
// values); 16-byte chunk c of line r is at c ^ (r & 7) (tile/swizzle.cuh).
//   K-major (Q, K):  lines are rows; `line_groups` = bytes from 8 rows to the next 8.
//   MN-major (V):    lines are steps of k, 64 columns wide; `line_groups` as above, `columns` = bytes to the next 64.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address, uint32_t line_groups, uint32_t columns) {
    return uint64_t(1) << 62 | uint64_t(line_groups >> 4) << 32 | uint64_t(columns >> 4) << 16 |
           (address & 0x3ffff) >> 4;
}

// The same for a K-major operand without swizzle. There 8 lines of 16 bytes make 128 bytes; `columns` = bytes to the
// next 8 of k.
__device__ __forceinline__ uint64_t wgmma_plain_operand(uint32_t address, uint32_t line_groups, uint32_t columns) {
    return uint64_t(line_groups >> 4) << 32 | uint64_t(columns >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// The descriptor of an operand that starts `bytes` further on, a multiple of 16. That is cheaper than a new
// descriptor, which takes four dependent uniform instructions before every wgmma.
__device__ __forceinline__ uint64_t wgmma_further(uint64_t operand, uint32_t bytes) {
    const uint32_t high = uint32_t(operand >> 32);
    const uint32_t low = opaque_value(uint32_t(operand));  // else the compiler makes more than one addition of it
    return uint64_t(high) << 32 | (low + (bytes >> 4));
}

// The descriptor of number `i` of operands that are `bytes` apart, a multiple of 16.
__device__ __forceinline__ uint64_t wgmma_operand_number(uint64_t first, int i, int bytes) {
    const uint32_t low = opaque_value(uint32_t(first));
    return first >> 32 << 32 | (low + uint32_t(i * (bytes / 16)));
}

// wgmma.fence: orders this thread's register writes before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: waits until at most N of the newest groups are running.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

enum class Values { BF16, F16 };
// SET: c = A . B. c is not read, so the compiler sees no dependence on it. ADD: c += A . B.
enum class Sum { SET, ADD };
// The layout of an operand in shared memory. K: the values of a row or column are contiguous. MN: those of a step of k
// are.
enum class Major { K, MN };

// An instruction names each register, so lists of registers are spelled out here, once: R<n> is the text, C<n>(k) the
// accumulators with constraint k.
#define C4_AT(k, i) k(c[i]), k(c[i + 1]), k(c[i + 2]), k(c[i + 3])
#define C16_AT(k, i) C4_AT(k, i), C4_AT(k, i + 4), C4_AT(k, i + 8), C4_AT(k, i + 12)
#define C32_AT(k, i) C16_AT(k, i), C16_AT(k, i + 16)
#define C4(k) C4_AT(k, 0)
#define C8(k) C4_AT(k, 0), C4_AT(k, 4)
#define C16(k) C16_AT(k, 0)
#define C32(k) C32_AT(k, 0)
#define C64(k) C32_AT(k, 0), C32_AT(k, 32)
#define C96(k) C32_AT(k, 0), C32_AT(k, 32), C32_AT(k, 64)
#define C128(k) C32_AT(k, 0), C32_AT(k, 32), C32_AT(k, 64), C32_AT(k, 96)
#define R4 "%0, %1, %2, %3"
#define R8 R4 ", %4, %5, %6, %7"
#define R16 R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R32  \
    R16 ", " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R64                                                                                \
    R32 ", "                                                                               \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R96                                                                                \
    R64 ", "                                                                               \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define R128                                                                                           \
    R64 ", "                                                                                           \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_AS(shape, type, registers, outputs, inputs, ...)                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64" shape "k16.f32." type "." type " {" registers "}, " inputs ";" \
                 : outputs                                                                                         \
                 : __VA_ARGS__)
// The instruction for VALUES and SUM, which are template parameters of the surrounding function. `inputs` is the text
// of the operands after c. The last inputs are immediates: whether c is read, and which operands are transposed.
#define WGMMA(shape, registers, outputs, inputs, ...)                           \
    if constexpr (VALUES == Values::BF16 && SUM == Sum::SET) {                  \
        WGMMA_AS(shape, "bf16", registers, outputs("=f"), inputs, __VA_ARGS__); \
    } else if constexpr (VALUES == Values::BF16) {                              \
        WGMMA_AS(shape, "bf16", registers, outputs("+f"), inputs, __VA_ARGS__); \
    } else if constexpr (SUM == Sum::SET) {                                     \
        WGMMA_AS(shape, "f16", registers, outputs("=f"), inputs, __VA_ARGS__);  \
    } else {                                                                    \
        WGMMA_AS(shape, "f16", registers, outputs("+f"), inputs, __VA_ARGS__);  \
    }
#define A_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// 64 x N products, N = 2 * (accumulators of a thread). A in shared memory:
template <Values VALUES, Sum SUM, Major A, Major B>
__device__ __forceinline__ void wgmma(float (&c)[4], uint64_t a, uint64_t b) {
    WGMMA("n8", R4, C4, "%4, %5, %6, 1, 1, %7, %8", "l"(a), "l"(b), "n"(SUM == Sum::ADD), "n"(A == Major::MN),
          "n"(B == Major::MN));
}
template <Values VALUES, Sum SUM, Major A, Major B>
__device__ __forceinline__ void wgmma(float (&c)[8], uint64_t a, uint64_t b) {
    WGMMA("n16", R8, C8, "%8, %9, %10, 1, 1, %11, %12", "l"(a), "l"(b), "n"(SUM == Sum::ADD), "n"(A == Major::MN),
          "n"(B == Major::MN));
}
template <Values VALUES, Sum SUM, Major A, Major B>
__device__ __forceinline__ void wgmma(float (&c)[16], uint64_t a, uint64_t b) {
    WGMMA("n32", R16, C16, "%16, %17, %18, 1, 1, %19, %20", "l"(a), "l"(b), "n"(SUM == Sum::ADD), "n"(A == Major::MN),
          "n"(B == Major::MN));
}
template <Values VALUES, Sum SUM, Major A, Major B>
__device__ __forceinline__ void wgmma(float (&c)[32], uint64_t a, uint64_t b) {
    WGMMA("n64", R32, C32, "%32, %33, %34, 1, 1, %35, %36", "l"(a), "l"(b), "n"(SUM == Sum::ADD), "n"(A == Major::MN),
          "n"(B == Major::MN));
}
template <Values VALUES, Sum SUM, Major A, Major B>
__device__ __forceinline__ void wgmma(float (&c)[128], uint64_t a, uint64_t b) {
    WGMMA("n256", R128, C128, "%128, %129, %130, 1, 1, %131, %132", "l"(a), "l"(b), "n"(SUM == Sum::ADD),
          "n"(A == Major::MN), "n"(B == Major::MN));
}

// A in registers:
template <Values VALUES, Sum SUM, Major B>
__device__ __forceinline__ void wgmma(float (&c)[8], const uint32_t (&a)[4], uint64_t b) {
    WGMMA("n16", R8, C8, "{%8, %9, %10, %11}, %12, %13, 1, 1, %14", A_REGISTERS, "l"(b), "n"(SUM == Sum::ADD),
          "n"(B == Major::MN));
}
template <Values VALUES, Sum SUM, Major B>
__device__ __forceinline__ void wgmma(float (&c)[16], const uint32_t (&a)[4], uint64_t b) {
    WGMMA("n32", R16, C16, "{%16, %17, %18, %19}, %20, %21, 1, 1, %22", A_REGISTERS, "l"(b), "n"(SUM == Sum::ADD),
          "n"(B == Major::MN));
}
template <Values VALUES, Sum SUM, Major B>
__device__ __forceinline__ void wgmma(float (&c)[32], const uint32_t (&a)[4], uint64_t b) {
    WGMMA("n64", R32, C32, "{%32, %33, %34, %35}, %36, %37, 1, 1, %38", A_REGISTERS, "l"(b), "n"(SUM == Sum::ADD),
          "n"(B == Major::MN));
}
template <Values VALUES, Sum SUM, Major B>
__device__ __forceinline__ void wgmma(float (&c)[128], const uint32_t (&a)[4], uint64_t b) {
    WGMMA("n256", R128, C128, "{%128, %129, %130, %131}, %132, %133, 1, 1, %134", A_REGISTERS, "l"(b),
          "n"(SUM == Sum::ADD), "n"(B == Major::MN));
}

// Products of bytes of one type, K-major:
#define WGMMA_BYTES_AS(shape, type, registers, outputs, inputs, ...)                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64" shape "k32.f32." type "." type " {" registers "}, " inputs \
                 ", 1, 1;"                                                                                     \
                 : outputs                                                                                     \
                 : __VA_ARGS__, "l"(b), "n"(SUM == Sum::ADD))
#define WGMMA_BYTES(shape, type, registers, outputs, inputs, ...)                   \
    if constexpr (SUM == Sum::SET) {                                                \
        WGMMA_BYTES_AS(shape, type, registers, outputs("=f"), inputs, __VA_ARGS__); \
    } else {                                                                        \
        WGMMA_BYTES_AS(shape, type, registers, outputs("+f"), inputs, __VA_ARGS__); \
    }

// A in shared memory, e4m3 or e5m2.
#define WGMMA_EITHER(shape, registers, outputs, inputs)                 \
    if constexpr (E5M2) {                                               \
        WGMMA_BYTES(shape, "e5m2", registers, outputs, inputs, "l"(a)); \
    } else {                                                            \
        WGMMA_BYTES(shape, "e4m3", registers, outputs, inputs, "l"(a)); \
    }
template <bool E5M2, Sum SUM>
__device__ __forceinline__ void wgmma_bytes(float (&c)[16], uint64_t a, uint64_t b) {
    WGMMA_EITHER("n32", R16, C16, "%16, %17, %18");
}
template <bool E5M2, Sum SUM>
__device__ __forceinline__ void wgmma_bytes(float (&c)[32], uint64_t a, uint64_t b) {
    WGMMA_EITHER("n64", R32, C32, "%32, %33, %34");
}
template <bool E5M2, Sum SUM>
__device__ __forceinline__ void wgmma_bytes(float (&c)[64], uint64_t a, uint64_t b) {
    WGMMA_EITHER("n128", R64, C64, "%64, %65, %66");
}
template <bool E5M2, Sum SUM>
__device__ __forceinline__ void wgmma_bytes(float (&c)[96], uint64_t a, uint64_t b) {
    WGMMA_EITHER("n192", R96, C96, "%96, %97, %98");
}
template <bool E5M2, Sum SUM>
__device__ __forceinline__ void wgmma_bytes(float (&c)[128], uint64_t a, uint64_t b) {
    WGMMA_EITHER("n256", R128, C128, "%128, %129, %130");
}

// A in registers, e5m2: each warp holds its 16 rows as fragments of mma.m16n8k32. a[i] holds four values of
// row g + 8 (i % 2), from k = 16 (i / 2) + 4 t on.
template <Sum SUM>
__device__ __forceinline__ void wgmma_e5m2(float (&c)[16], const uint32_t (&a)[4], uint64_t b) {
    WGMMA_BYTES("n32", "e5m2", R16, C16, "{%16, %17, %18, %19}, %20, %21", A_REGISTERS);
}
template <Sum SUM>
__device__ __forceinline__ void wgmma_e5m2(float (&c)[32], const uint32_t (&a)[4], uint64_t b) {
    WGMMA_BYTES("n64", "e5m2", R32, C32, "{%32, %33, %34, %35}, %36, %37", A_REGISTERS);
}
template <Sum SUM>
__device__ __forceinline__ void wgmma_e5m2(float (&c)[64], const uint32_t (&a)[4], uint64_t b) {
    WGMMA_BYTES("n128", "e5m2", R64, C64, "{%64, %65, %66, %67}, %68, %69", A_REGISTERS);
}
template <Sum SUM>
__device__ __forceinline__ void wgmma_e5m2(float (&c)[96], const uint32_t (&a)[4], uint64_t b) {
    WGMMA_BYTES("n192", "e5m2", R96, C96, "{%96, %97, %98, %99}, %100, %101", A_REGISTERS);
}
template <Sum SUM>
__device__ __forceinline__ void wgmma_e5m2(float (&c)[128], const uint32_t (&a)[4], uint64_t b) {
    WGMMA_BYTES("n256", "e5m2", R128, C128, "{%128, %129, %130, %131}, %132, %133", A_REGISTERS);
}

#undef C4_AT
#undef C16_AT
#undef C32_AT
#undef C4
#undef C8
#undef C16
#undef C32
#undef C64
#undef C96
#undef C128
#undef R4
#undef R8
#undef R16
#undef R32
#undef R64
#undef R96
#undef R128
#undef WGMMA_AS
#undef WGMMA
#undef WGMMA_BYTES_AS
#undef WGMMA_BYTES
#undef WGMMA_EITHER
#undef A_REGISTERS
