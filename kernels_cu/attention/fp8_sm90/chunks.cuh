// The chunks of a partial result of fp8_sm90.
//
// A chunk has, of one line, two columns each of four column blocks of 64: what a thread holds. Chunk 256 c + thread is of
// the thread's c-th line (tile/heads.cuh).
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ int line_of_chunk(int chunk) {
    return chunk / 256 / 2 * 8 + chunk % 4 * 2 + chunk / 256 % 2;
}
// The first of its columns, of which each two stand together, and the next two so many further.
constexpr int COLUMNS_APART = 64;
__device__ __forceinline__ int column_of_chunk(int chunk) {
    const int thread = chunk % 256;
    return thread / 128 * 256 + thread % 128 / 32 * 16 + thread % 32 / 4 * 2;
}

// For dense_combine.cu: the chunks of GROUP_LINES lines stand side by side, of which lane l of a warp has those of line
// l % GROUP_LINES. Each lane has GROUP_CHUNKS of a group, chunk n of which is the following.
constexpr int GROUP_LINES = 4, GROUP_CHUNKS = 8;
__device__ __forceinline__ int chunk_of_group(int group, int n, int lane) { return 256 * group + 32 * n + lane; }
// Groups that have all of so many lines.
__device__ __forceinline__ int groups_of(int lines) { return (lines + 7) / 8 * 2; }
