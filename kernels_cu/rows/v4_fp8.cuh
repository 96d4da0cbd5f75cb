// Layouts whose UE8M0 scales are stored behind all rows of a block:
//   V4_FP8          448 e4m3 and 64 bfloat16; 7 scales and a byte of padding
//   V41_FP8_SPLIT   512 e4m3; 16 scales
#pragma once
#include "rows/paged.cuh"
#include "rows/place.cuh"

struct Row {
    static constexpr bool QUANTIZED = true;
    static constexpr int FOLDED_SCALES = 0;
    static constexpr int SCALES_BEHIND = SCALE_STRIDE;
    static constexpr int STAGED_BYTES = ROW_STRIDE + 16;  // scales come behind the data; rows stay aligned to 16

    const uint8_t* data;
    const uint8_t* scale_bytes;

    __device__ __forceinline__ const uint8_t* scales() const { return scale_bytes; }

    static __device__ __forceinline__ Row in_block(const uint8_t* block, int64_t offset, int64_t block_size,
                                                   int64_t row_stride = ROW_STRIDE) {
        const auto place = place_in_block(block, offset, block_size, row_stride);
        return {place.data, place.scales};
    }
    static __device__ __forceinline__ Row of_slot(const Source& s, int32_t slot) {
        const Slot at = find_slot(s, slot);
        return in_block(at.block, at.offset, s.block_size);
    }
    static __device__ __forceinline__ Row none() { return {nullptr, nullptr}; }
};
