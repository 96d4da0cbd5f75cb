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

// Chunk `n` of the 64 of a line.
__device__ __forceinline__ int chunk_of_line(int line, int n) {
    return 256 * (line / 8 * 2 + line % 2) + 4 * n + line % 8 / 2;
}
