// A tile of bf16 KV rows in shared memory, one row after the other, swizzled.
#pragma once
#include "tile/swizzle.cuh"

constexpr int ROW_BYTES = 2 * D_QK;
constexpr int ROW_CHUNKS = ROW_BYTES / 16;
static_assert(ROW_BYTES % LINE_BYTES == 0, "the swizzle works on 128 bytes");

__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
    return tile + row * ROW_BYTES + swizzle(row, chunk);
}
