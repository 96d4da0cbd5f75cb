// Layout PLAIN_FP8: D_QK e4m3, RoPE among them. One scale for all rows is an argument of the call.
#pragma once
#include "rows/paged.cuh"
#include "rows/place.cuh"

struct Row {
    static constexpr bool QUANTIZED = true;
    static constexpr int FOLDED_SCALES = 0;
    static constexpr int SCALES_BEHIND = 0;
    static constexpr int STAGED_BYTES = ROW_STRIDE + 16;

    const uint8_t* data;

    __device__ __forceinline__ const uint8_t* scales() const { return nullptr; }

    static __device__ __forceinline__ Row in_block(const uint8_t* block, int64_t offset, int64_t block_size,
                                                   int64_t row_stride = ROW_STRIDE) {
        return {place_in_block(block, offset, block_size, row_stride).data};
    }
    static __device__ __forceinline__ Row of_slot(const Source& s, int32_t slot) {
        const Slot at = find_slot(s, slot);
        return in_block(at.block, at.offset, s.block_size);
    }
    static __device__ __forceinline__ Row none() { return {nullptr}; }
};
