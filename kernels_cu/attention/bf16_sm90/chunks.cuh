// Part of bf16_sm90: the chunks of a partial result. A chunk is 16 bytes: eight f16 of one line, as one thread holds
// them.
//
// They are two neighbouring columns of each of four neighbouring groups of eight. The chunks of 16 lines are
// contiguous, so that those of padding lines can be left out.
#pragma once
#include "ptx/types.cuh"

constexpr int CHUNKS_OF_WARP = 1024;  // chunks of a warp's 16 lines

// The index of chunk n (of 8) of a thread's line i.
__device__ __forceinline__ int chunk_of(int warpgroup, int warp, int lane, int i, int n) {
    return warp * CHUNKS_OF_WARP + i * 512 + n * 64 + warpgroup * 32 + lane;
}
__device__ __forceinline__ int line_of_chunk(int chunk) {
    return chunk / CHUNKS_OF_WARP * 16 + chunk / 512 % 2 * 8 + chunk % 32 / 4;
}
// A chunk has columns column_of_chunk(..) and the next one, and the same two COLUMNS_APART, 2 COLUMNS_APART and 3
// COLUMNS_APART further on.
constexpr int COLUMNS_APART = 8;
__device__ __forceinline__ int column_of_chunk(int chunk) {
    return chunk % 64 / 32 * 256 + chunk / 64 % 8 * 32 + chunk % 4 * 2;
}

// For dense_combine.cu: a group is one line. Each lane of a warp takes GROUP_CHUNKS of its 64 chunks.
constexpr int GROUP_LINES = 1, GROUP_CHUNKS = 2;
__device__ __forceinline__ int chunk_of_group(int line, int n, int lane) {
    return chunk_of(lane / 4 % 2, line / 16, line % 8 * 4 + lane % 4, line / 8 % 2, lane / 8 + 4 * n);
}
// The number of groups that cover `lines` lines.
__device__ __forceinline__ int groups_of(int lines) { return lines; }
