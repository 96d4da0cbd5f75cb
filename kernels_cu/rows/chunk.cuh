// Chunks of eight bf16 between registers and global memory, in one 16-byte access where the arrays allow it.
#pragma once
#include "ptx/global.cuh"

constexpr int CHUNK = 8;  // values

__device__ __forceinline__ Vec16 load_chunk(const bf16* from, bool aligned) {
    if (aligned) return *reinterpret_cast<const Vec16*>(from);
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = from[2 * i] | uint32_t(from[2 * i + 1]) << 16;
    return {w[0], w[1], w[2], w[3]};
}

__device__ __forceinline__ void store_chunk(bf16* to, const Vec16& v, bool aligned) {
    if (aligned) {
        store_16(to, v);
        return;
    }
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) to[i] = bf16(w[i / 2] >> (16 * (i % 2)));
}
