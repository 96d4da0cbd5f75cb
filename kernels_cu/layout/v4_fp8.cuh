// Layout V4_FP8: 448 e4m3 and 64 bfloat16 a token; its 7 UE8M0 scales and a pad byte stand after all tokens of the block.
#pragma once
#include "tile/dequantize.cuh"
#include "tile/gather.cuh"

struct Rows {
    static constexpr bool QUANTIZED = true;
    static constexpr int STAGED_BYTES = ROW_STRIDE + 16;  // 8 bytes of scales behind the data, rows stay 16-byte aligned

    const uint8_t* data;
    const uint8_t* scales;

    static __device__ __forceinline__ Rows row_of(const Source& s, int32_t slot) {
        const Slot at = find_slot(s, slot);
        return {at.block + int64_t(at.offset) * ROW_STRIDE,
                at.block + int64_t(s.block_size) * ROW_STRIDE + int64_t(at.offset) * SCALE_STRIDE};
    }

    static __device__ __forceinline__ Rows none() { return {nullptr, nullptr}; }

    template <int ROWS>
    static __device__ __forceinline__ void gather(uint32_t staged, int first, Rows mine, bool) {
        gather_chunks<ROWS, ROW_STRIDE / 16>(
            mine.data, [&](int r, int c) { return staged + (first + r) * STAGED_BYTES + 16 * c; });
        const int lane = threadIdx.x % 32;
        if (lane < ROWS) cp_async_8(staged + (first + lane) * STAGED_BYTES + ROW_STRIDE, mine.scales, mine.scales != nullptr);
    }

    template <int ROWS, int THREADS>
    static __device__ __forceinline__ void dequantize(uint32_t staged, uint32_t tile) {
        dequantize_rows<ROWS, THREADS, STAGED_BYTES>(staged, tile, [](uint32_t row, int chunk) {
            return ue8m0_to_float(load_shared_byte(row + ROW_STRIDE + chunk / (SCALE_TILE / 8)));
        });
    }
};
