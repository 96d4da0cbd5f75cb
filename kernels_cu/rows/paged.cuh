// A paged cache, and index lists that name its rows. (A flat array of rows is a cache of one block.)
#pragma once
#include "ptx/types.cuh"

// cupy_mla/cuda/structs.py declares the same fields.
struct Source {
    const uint8_t* cache;
    const int32_t* indices;  // [b, s_q, topk] list entries: slots, or -1
    const int32_t* lengths;  // [b], or null
    int64_t block_stride;    // bytes
    int64_t row_stride;      // bytes
    int64_t index_stride_b;  // items
    int64_t index_stride_s;
    int64_t num_slots;
    int32_t topk;
    int32_t block_size;
};

// The length of the index list of a query of request `b`.
__device__ __forceinline__ int list_length(const Source& s, int b) {
    return s.lengths == nullptr ? s.topk : max(0, min(s.lengths[b], s.topk));
}

// A slot's block, and its row's number in the block.
struct Slot {
    const uint8_t* block;
    int offset;
};

__device__ __forceinline__ Slot find_slot(const Source& s, int32_t slot) {
    const uint32_t size = s.block_size;  // for powers of two a shift replaces the division
    const uint32_t block = (size & (size - 1)) == 0 ? uint32_t(slot) >> (31 - __clz(size)) : uint32_t(slot) / size;
    return {s.cache + int64_t(block) * s.block_stride, int(uint32_t(slot) - block * uint32_t(s.block_size))};
}
