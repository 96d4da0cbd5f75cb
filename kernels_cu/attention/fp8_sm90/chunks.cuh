// The chunks of a partial result of fp8_sm90. A chunk is 16 bytes: eight f16 of one line, as one thread holds them.
//
// They are two neighbouring columns of each of the four column blocks of 64 in the thread's half. Chunk 256 c + thread
// belongs to the thread's c-th line (tile/heads.cuh).
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ int line_of_chunk(int chunk) {
    return chunk / 256 / 2 * 8 + chunk % 4 * 2 + chunk / 256 % 2;
}
// A chunk has columns column_of_chunk(..) and the next one, and the same two COLUMNS_APART, 2 COLUMNS_APART and 3
// COLUMNS_APART further on.
constexpr int COLUMNS_APART = 64;
__device__ __forceinline__ int column_of_chunk(int chunk) {
    const int thread = chunk % 256;
    return thread / 128 * 256 + thread % 128 / 32 * 16 + thread % 32 / 4 * 2;
}

// For dense_combine.cu. A group is GROUP_LINES lines whose chunks are neighbours in memory. Lane l of a warp takes
// chunks of line l % GROUP_LINES of the group: GROUP_CHUNKS of them, of which chunk_of_group gives the n-th.
constexpr int GROUP_LINES = 4, GROUP_CHUNKS = 8;
__device__ __forceinline__ int chunk_of_group(int group, int n, int lane) { return 256 * group + 32 * n + lane; }
// The number of groups that cover `lines` lines.
__device__ __forceinline__ int groups_of(int lines) { return (lines + 7) / 8 * 2; }
