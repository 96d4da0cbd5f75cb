// The swizzle of tiles in shared memory: 16-byte chunk c of line r stands at place c ^ (r & 7) of its 128 bytes.
//
// A line takes a multiple of 128 bytes, so that without it the same column of all lines would lie in the same banks.
// With it both eight lines of one column (what ldmatrix reads) and eight chunks of one line (what a copy writes) meet
// all banks. It is the 128-byte swizzle of wgmma (ptx/wgmma.cuh).
#pragma once
#include "ptx/types.cuh"

constexpr int LINE_BYTES = 128;  // of a column block: 64 16-bit values

// Where a chunk stands in its 128 bytes.
__device__ __forceinline__ uint32_t swizzle(int line, int chunk) { return (chunk ^ (line & 7)) << 4; }

// The address of chunk `chunk` of line `line` of a column block: lines of 128 bytes, eight chunks each.
__device__ __forceinline__ uint32_t swizzled(uint32_t block, const int& line, const int& chunk) {
    return block + line * LINE_BYTES + ((chunk ^ (line & 7)) << 4);
}

// The same where a quad reads 64 bytes of a line at a time, and so eight lanes those of two neighbouring lines: these, too,
// meet all banks.
__device__ __forceinline__ uint32_t swizzle_pairs(int line, int chunk) {
    return (chunk ^ ((line & 1) << 2 | (line >> 1 & 3))) << 4;
}
