// Block tables: from a position in a request to the block that holds it.
#pragma once
#include "ptx/types.cuh"

// A divisor that is prepared on the host: n / value = n * multiplier >> shift, exact for 0 <= n < 2^31
// (cupy_mla/cuda/structs.py).
struct Divisor {
    uint32_t value, multiplier, shift;
};

__device__ __forceinline__ int32_t divide(int32_t n, const Divisor& by) {
    return int32_t((uint64_t(uint32_t(n)) * by.multiplier) >> by.shift);
}

struct BlockTable {
    const int32_t* blocks;  // [num_requests, width]
    int64_t stride;         // items
    int32_t num_requests, width;
    Divisor block_size;
    int32_t block_stride;  // slots from one block's first slot to the next block's: at least the block size
};

// A position's column in the block table, and its offset in the block. Column -1: the table has no such position.
struct Position {
    int32_t column, offset;
};

__device__ __forceinline__ Position find_position(const BlockTable& t, int32_t position) {
    if (position < 0) return {-1, 0};
    const int32_t column = divide(position, t.block_size);
    if (column >= t.width) return {-1, 0};
    return {column, position - column * int32_t(t.block_size.value)};
}

__device__ __forceinline__ bool has_request(const BlockTable& t, int32_t request) {
    return uint32_t(request) < uint32_t(t.num_requests);
}

// The slot of an offset in a block. -1 if there is no such block, or the slot does not fit int32.
__device__ __forceinline__ int32_t slot_in_block(const BlockTable& t, int32_t block, int32_t offset) {
    const int64_t slot = int64_t(block) * t.block_stride + offset;
    return block >= 0 && slot <= 0x7fffffff ? int32_t(slot) : -1;
}

// Calls `act(start of the block, offset in it)` for a request's position, if the cache has its block.
template <typename Act>
__device__ __forceinline__ void with_block_of(const BlockTable& t, int request, int32_t position,
                                              const uint8_t* const& cache, const int64_t& block_stride,
                                              const int32_t& num_blocks, Act act) {
    const Position at = find_position(t, position);
    if (at.column >= 0) {
        const int32_t block = t.blocks[request * t.stride + at.column];
        if (uint32_t(block) < uint32_t(num_blocks)) act(cache + block * block_stride, at.offset);
    }
}
