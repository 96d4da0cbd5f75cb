// Copying rows that an index list names into shared memory, a warp at a time.
#pragma once
#include "rows/paged.cuh"
#include "ptx/cp_async.cuh"

// Eight lanes copy a row, in pieces of 16 bytes: lane l the pieces l % 8, l % 8 + 8, ... of row l / 8 of every four.
// The eight lanes touch 128 bytes in a row, and `to` + 128 * i is where piece 8 * i + l % 8 goes. Pieces of an invalid
// row (`from` null) are written as zeros, and nothing is read for them.
constexpr int ROWS_AT_ONCE = 4;

template <int CHUNKS>
__device__ __forceinline__ void copy_row(uint32_t to, const uint8_t* from, int lane) {
    const bool valid = from != nullptr;
    from += lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < CHUNKS / 8; ++i) cp_async_16(to + 128 * i, from + 128 * i, valid);
    if (CHUNKS % 8 != 0 && lane % 8 < CHUNKS % 8)
        cp_async_16(to + CHUNKS / 8 * 128, from + CHUNKS / 8 * 128, valid);
}
