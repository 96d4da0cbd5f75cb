// Layouts
//   V32_FP8        512 e4m3, 4 float32 scales, 64 bfloat16, together in 656 bytes
//   V32_NOPE_FP8   the same without the bfloat16
//   V41_FP8        512 e4m3, RoPE among them, and 16 UE8M0 scales, together in 528 bytes
#pragma once
#include "rows/paged.cuh"
#include "rows/place.cuh"

struct Row {
    static constexpr bool QUANTIZED = true;
    static constexpr int FOLDED_SCALES = SCALE_E8M0 ? 0 : NUM_SCALES;
    static constexpr int SCALES_BEHIND = 0;
    static constexpr int STAGED_BYTES = ROW_STRIDE;

    const uint8_t* data;

    __device__ __forceinline__ const uint8_t* scales() const { return data + SCALE_OFFSET; }

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
