// PTX ISA: cvta.to.shared, ld.shared, st.shared.
#pragma once
#include "ptx/types.cuh"

// The address of shared memory in the form that PTX instructions take.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void store_shared_16(uint32_t address, const Vec16& v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t address, const Vec8& v) {
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ Vec16 load_shared_16(uint32_t address) {
    Vec16 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ Vec8 load_shared_8(uint32_t address) {
    Vec8 v;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint32_t load_shared_2(uint32_t address) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
