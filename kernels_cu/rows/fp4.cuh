// Rows of e2m1 under e4m3 scales, which stand in the row or behind all rows of the block. Layouts V32_NVFP4: 512 e2m1, 64
// e4m3, 32 scales, together in 352 bytes; V4_NVFP4: 448 e2m1, 64 bfloat16; 28 scales and 4 bytes of padding apart.
#pragma once
#include "rows/paged.cuh"
#include "rows/place.cuh"

struct Row {
    static constexpr bool QUANTIZED = true;
    static constexpr int FOLDED_SCALES = 0;
    static constexpr int SCALES_BEHIND = SCALES_APART ? SCALE_STRIDE : 0;
    static constexpr int STAGED_BYTES = ROW_STRIDE + SCALES_BEHIND + 16;
    static_assert(STAGED_BYTES % 32 == 16, "");

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
