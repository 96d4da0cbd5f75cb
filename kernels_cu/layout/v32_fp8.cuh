// Layout V32_FP8: 512 e4m3, 4 float32 scales, 64 bfloat16, together in 656 bytes.
#pragma once
#include "tile/dequantize.cuh"
#include "tile/gather.cuh"

struct Rows {
    static constexpr bool QUANTIZED = true;
    static constexpr int STAGED_BYTES = ROW_STRIDE;

    const uint8_t* data;

    static __device__ __forceinline__ Rows row_of(const Source& s, int32_t slot) {
        const Slot at = find_slot(s, slot);
        return {at.block + int64_t(at.offset) * ROW_STRIDE};
    }

    static __device__ __forceinline__ Rows none() { return {nullptr}; }

    template <int ROWS>
    static __device__ __forceinline__ void gather(uint32_t staged, int first, Rows mine, bool) {
        gather_chunks<ROWS, ROW_STRIDE / 16>(
            mine.data, [&](int r, int c) { return staged + (first + r) * STAGED_BYTES + 16 * c; });
    }

    template <int ROWS, int THREADS>
    static __device__ __forceinline__ void dequantize(uint32_t staged, uint32_t tile) {
        dequantize_rows<ROWS, THREADS, STAGED_BYTES>(staged, tile, [](uint32_t row, int chunk) {
            return load_shared_float(row + SCALE_OFFSET + 4 * (chunk / (SCALE_TILE / 8)));
        });
    }
};
