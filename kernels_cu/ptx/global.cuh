// PTX ISA: ld.relaxed.gpu.global. The assembler keeps these loads in the order of the source; ordinary loads it may
// delay until registers are free.
#pragma once
#include "ptx/types.cuh"

// 16 bytes where `valid`, else zeros.
__device__ __forceinline__ Vec16 load_in_order_16(const float* from, bool valid) {
    Vec16 v = {0, 0, 0, 0};
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "@p ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(uint32_t(valid)));
    return v;
}

// A float32 where `valid`, else `otherwise`.
__device__ __forceinline__ float load_in_order(const float* from, bool valid, float otherwise) {
    float v = otherwise;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "@p ld.relaxed.gpu.global.f32 %0, [%1];\n"
        "}\n"
        : "+f"(v)
        : "l"(from), "r"(uint32_t(valid)));
    return v;
}

// Loads a word from L2: L1 may hold an older one.
__device__ __forceinline__ uint32_t load_relaxed(const void* from) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}

__device__ __forceinline__ void store_relaxed(uint64_t* to, uint64_t v) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

// PTX ISA: ld.acquire.gpu.global, st.release.gpu.global: a word with which one CTA hands memory over to another.
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* from) {
    uint64_t v;
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void store_release(uint64_t* to, uint64_t v) {
    asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

// Stores 16 bytes at once. The assignment of a struct may become a store for each member.
__device__ __forceinline__ void store_16(void* to, const Vec16& v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
