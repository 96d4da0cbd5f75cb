// Where a row and its scales are stored. Constants of the layout: cupy_mla/layouts.py.
#pragma once
#include "ptx/types.cuh"

// Whether scales are stored behind all rows of a block, rather than each in its row.
constexpr bool SCALES_APART = SCALE_OFFSET < 0;

// Pointers, or bytes from the start of the cache.
template <typename T>
struct RowPlace {
    T data, scales;
};

// The place of row `offset` of the block that begins at `start`.
template <typename T>
__device__ __forceinline__ RowPlace<T> place_in_block(T start, int64_t offset, int64_t block_size,
                                                      const int64_t& row_stride) {
    const T data = start + offset * row_stride;
    return {data, SCALES_APART ? start + block_size * row_stride + offset * SCALE_STRIDE : data + SCALE_OFFSET};
}

// The place of a slot in the cache. Slots that are negative or beyond the cache have the place -1. (Arguments are
// references, so that nothing is loaded for a slot that is skipped.)
__device__ __forceinline__ RowPlace<int64_t> place_of_slot(int64_t slot, const int64_t& num_slots,
                                                           const int32_t& block_size, const int64_t& block_stride,
                                                           const int64_t& row_stride) {
    if (slot < 0 || slot >= num_slots) return {-1, -1};
    const int64_t block = slot / block_size, offset = slot - block * block_size;
    return place_in_block(block * block_stride, offset, block_size, row_stride);
}
