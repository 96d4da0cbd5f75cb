// Layout BF16: a row is D_QK bfloat16 and goes straight into the tile.
#pragma once
#include "tile/gather.cuh"
#include "tile/row_tile.cuh"

struct Rows {
    static constexpr bool QUANTIZED = false;
    static constexpr int STAGED_BYTES = 0;
    static constexpr int FOLDED_SCALES = 0;

    const uint8_t* data;

    static __device__ __forceinline__ Rows row_of(const Source& s, int32_t slot) {
        const Slot at = find_slot(s, slot);
        return {at.block + int64_t(at.offset) * s.row_stride};
    }

    static __device__ __forceinline__ Rows none() { return {nullptr}; }

    // `row` is the tile row this lane copies to with seven others. `aligned`: every row starts at a multiple of 16
    // bytes; rows that do not are copied item by item.
    __device__ __forceinline__ void copy(uint32_t tile, int row, int lane, bool aligned) const {
        const uint32_t to = chunk_address(tile, row, lane % 8);
        if (aligned) {
            copy_row<ROW_CHUNKS>(to, data, lane);
            return;
        }
        const auto* from = reinterpret_cast<const bf16*>(data) + lane % 8 * 8;
#pragma unroll 1
        for (int i = 0; i < ROW_CHUNKS / 8; ++i) {
            uint32_t w[4] = {0, 0, 0, 0};
            if (data != nullptr) {
#pragma unroll
                for (int j = 0; j < 4; ++j) w[j] = from[64 * i + 2 * j] | uint32_t(from[64 * i + 2 * j + 1]) << 16;
            }
            store_shared(to + 128 * i, {w[0], w[1], w[2], w[3]});
        }
    }

    // Rows are never staged.
    template <int ROWS, int THREADS>
    static __device__ __forceinline__ void dequantize(uint32_t, uint32_t, uint32_t) {}
};
