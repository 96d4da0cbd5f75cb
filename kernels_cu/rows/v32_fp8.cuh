// Layout V32_FP8: 512 e4m3, 4 float32 scales, 64 bfloat16, together in 656 bytes.
#pragma once
#include "tile/dequantize.cuh"
#include "tile/gather.cuh"

struct Rows {
    static constexpr bool QUANTIZED = true;
    static constexpr int STAGED_BYTES = ROW_STRIDE;
    static constexpr int FOLDED_SCALES = NUM_SCALES;

    const uint8_t* data;

    static __device__ __forceinline__ Rows row_of(const Source& s, int32_t slot) {
        const Slot at = find_slot(s, slot);
        return {at.block + int64_t(at.offset) * ROW_STRIDE};
    }

    static __device__ __forceinline__ Rows none() { return {nullptr}; }

    // `row` is the staged row this lane copies to with seven others.
    __device__ __forceinline__ void copy(uint32_t staged, int row, int lane, bool) const {
        copy_row<ROW_STRIDE / 16>(staged + row * STAGED_BYTES + lane % 8 * 16, data, lane);
    }

    // The scales go to `scales`, [FOLDED_SCALES][ROWS] float32.
    template <int ROWS, int THREADS>
    static __device__ __forceinline__ void dequantize(uint32_t staged, uint32_t tile, uint32_t scales) {
        dequantize_rows<ROWS, THREADS, STAGED_BYTES>(staged, tile, [](uint32_t, int) { return 1.0f; });
        if (threadIdx.x < ROWS) {
            const Vec16 four = load_shared_16(staged + threadIdx.x * STAGED_BYTES + SCALE_OFFSET);
            const uint32_t words[] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < FOLDED_SCALES; ++i) store_shared_4(scales + (i * ROWS + threadIdx.x) * 4, words[i]);
        }
    }
};
