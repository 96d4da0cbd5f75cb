// A row of e2m1 values under e4m3 scales. The scales are in the row from byte SCALES_AT on. If that is negative, they
// are behind all rows of the block, SCALES_EACH bytes a row.
#pragma once
#include "rows/paged.cuh"

template <int STRIDE, int SCALES_AT, int SCALES_EACH>
struct Fp4Row {
    static constexpr bool QUANTIZED = true;
    static constexpr int FOLDED_SCALES = 0;
    static constexpr int SCALES_BEHIND = SCALES_AT < 0 ? SCALES_EACH : 0;
    static constexpr int STAGED_BYTES = STRIDE + SCALES_BEHIND + 16;
    static_assert(STAGED_BYTES % 32 == 16, "");

    const uint8_t* data;
    const uint8_t* scale_bytes;

    __device__ __forceinline__ const uint8_t* scales() const { return scale_bytes; }

    static __device__ __forceinline__ Fp4Row in_block(const uint8_t* block, int64_t offset, int64_t block_size,
                                                      int64_t row_stride = STRIDE) {
        const uint8_t* data = block + offset * row_stride;
        return {data, SCALES_AT < 0 ? block + block_size * row_stride + offset * SCALES_EACH : data + SCALES_AT};
    }
    static __device__ __forceinline__ Fp4Row of_slot(const Source& s, int32_t slot) {
        const Slot at = find_slot(s, slot);
        return in_block(at.block, at.offset, s.block_size);
    }
    static __device__ __forceinline__ Fp4Row none() { return {nullptr, nullptr}; }
};
