// The swizzle of tiles in shared memory: the 16-byte chunk c of line r is at place c ^ (r & 7) of its 128 bytes.
//
// Lines are a multiple of 128 bytes long. Without a swizzle, the same column of all lines would be in the same banks.
// With it, eight lines of one column, which ldmatrix reads, hit all banks, and so do eight chunks of one line, which a
// copy writes. It is the 128-byte swizzle of wgmma (ptx/wgmma.cuh).
#pragma once
#include "ptx/types.cuh"

constexpr int LINE_BYTES = 128;  // a line of a column block: 64 16-bit values

// A chunk's offset in its 128 bytes.
__device__ __forceinline__ uint32_t swizzle(int line, int chunk) { return (chunk ^ (line & 7)) << 4; }

// The address of a chunk in a column block, whose lines are 128 bytes or eight chunks long.
__device__ __forceinline__ uint32_t swizzled(uint32_t block, const int& line, const int& chunk) {
    return block + line * LINE_BYTES + ((chunk ^ (line & 7)) << 4);
}

// A chunk's offset where a quad reads 64 bytes of a line at a time. Then eight lanes read two neighbouring lines, and
// hit all banks, too.
__device__ __forceinline__ uint32_t swizzle_pairs(int line, int chunk) {
    return (chunk ^ ((line & 1) << 2 | (line >> 1 & 3))) << 4;
}
