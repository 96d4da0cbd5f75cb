// A tile of bf16 KV rows in shared memory.
//
// A row takes 2 * D_QK bytes, a multiple of 128, so the same column of all rows would fall into the same banks. The
// 16-byte chunks of a row are therefore exchanged within each 128 bytes: chunk c of row r stands at c ^ (r & 7).
// Eight rows of one chunk column (what ldmatrix reads) and eight chunks of one row (what a copy writes) then both
// cover all banks.
#pragma once
#include "ptx/types.cuh"

constexpr int ROW_BYTES = 2 * D_QK;
constexpr int ROW_CHUNKS = ROW_BYTES / 16;
static_assert(ROW_BYTES % 128 == 0, "the swizzle works on 128-byte groups");

__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
    return tile + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ void store_shared(uint32_t address, const Vec16& v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ Vec16 load_shared_16(uint32_t address) {
    Vec16 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
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

__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
