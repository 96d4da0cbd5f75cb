// Layout V4_FP8: 448 e4m3 and 64 bfloat16 a token; its 7 UE8M0 scales and a pad byte stand after all tokens of the block.
#pragma once
#include "tile/dequantize.cuh"
#include "tile/gather.cuh"

struct Rows {
    static constexpr bool QUANTIZED = true;
    static constexpr int STAGED_BYTES = ROW_STRIDE + 16;  // 8 bytes of scales behind the data, rows stay 16-byte aligned
    static constexpr int FOLDED_SCALES = 0;

    const uint8_t* data;
    const uint8_t* scales;

    static __device__ __forceinline__ Rows row_of(const Source& s, int32_t slot) {
        const Slot at = find_slot(s, slot);
        return {at.block + int64_t(at.offset) * ROW_STRIDE,
                at.block + int64_t(s.block_size) * ROW_STRIDE + int64_t(at.offset) * SCALE_STRIDE};
    }

    static __device__ __forceinline__ Rows none() { return {nullptr, nullptr}; }

    // `row` is the staged row this lane copies to with seven others.
    __device__ __forceinline__ void copy(uint32_t staged, int row, int lane, bool) const {
        copy_row<ROW_STRIDE / 16>(staged + row * STAGED_BYTES + lane % 8 * 16, data, lane);
        if (lane % 8 == 0) cp_async_8(staged + row * STAGED_BYTES + ROW_STRIDE, scales, scales != nullptr);
    }

    template <int ROWS, int THREADS>
    static __device__ __forceinline__ void dequantize(uint32_t staged, uint32_t tile, uint32_t) {
        dequantize_rows<ROWS, THREADS, STAGED_BYTES>(staged, tile, [](uint32_t row, int chunk) {
            return ue8m0_to_float(load_shared_byte(row + ROW_STRIDE + chunk / (SCALE_TILE / 8)));
        });
    }
};
