// Of bf16_sm90: the chunks of a partial result.
//
// A chunk has, of one line, two columns each of four neighbouring eights: what a thread holds. The chunks of 16 lines
// stand together, so that those of padding can be left out.
#pragma once
#include "ptx/types.cuh"

constexpr int CHUNKS_OF_WARP = 1024;  // of 16 lines

// Chunk n, of 8, of a thread's line i in a warpgroup.
__device__ __forceinline__ int chunk_of(int warpgroup, int warp, int lane, int i, int n) {
    return warp * CHUNKS_OF_WARP + i * 512 + n * 64 + warpgroup * 32 + lane;
}
__device__ __forceinline__ int line_of_chunk(int chunk) {
    return chunk / CHUNKS_OF_WARP * 16 + chunk / 512 % 2 * 8 + chunk % 32 / 4;
}
// The first of its columns, of which each two stand together, and the next two so many further.
constexpr int COLUMNS_APART = 8;
__device__ __forceinline__ int column_of_chunk(int chunk) {
    return chunk % 64 / 32 * 256 + chunk / 64 % 8 * 32 + chunk % 4 * 2;
}

// For dense_combine.cu: a group is a line, of whose 64 chunks each lane of a warp has GROUP_CHUNKS.
constexpr int GROUP_LINES = 1, GROUP_CHUNKS = 2;
__device__ __forceinline__ int chunk_of_group(int line, int n, int lane) {
    return chunk_of(lane / 4 % 2, line / 16, line % 8 * 4 + lane % 4, line / 8 % 2, lane / 8 + 4 * n);
}
// Groups that have all of so many lines.
__device__ __forceinline__ int groups_of(int lines) { return lines; }
