// Layout BF16: D_QK bfloat16, rows at any stride.
#pragma once
#include "rows/paged.cuh"

struct Row {
    static constexpr bool QUANTIZED = false;
    static constexpr int FOLDED_SCALES = 0;
    static constexpr int SCALES_BEHIND = 0;
    static constexpr int STAGED_BYTES = 2 * D_QK + 16;

    const uint8_t* data;

    __device__ __forceinline__ const uint8_t* scales() const { return nullptr; }

    static __device__ __forceinline__ Row in_block(const uint8_t* block, int64_t offset, int64_t, int64_t row_stride) {
        return {block + offset * row_stride};
    }
    static __device__ __forceinline__ Row of_slot(const Source& s, int32_t slot) {
        const Slot at = find_slot(s, slot);
        return in_block(at.block, at.offset, s.block_size, s.row_stride);
    }
    static __device__ __forceinline__ Row none() { return {nullptr}; }
};
