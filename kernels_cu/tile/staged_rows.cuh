// Copies of rows of any layout on their way to a tile of bf16 rows. bf16 rows go to the tile itself. Quantized rows go
// to a staging area in their form in the cache.
#pragma once
#include "ptx/shared.cuh"
#include "rows/reader.cuh"
#include "tile/copy_row.cuh"
#include "tile/row_tile.cuh"

static_assert(Row::SCALES_BEHIND <= 8 || Row::SCALES_BEHIND % 16 == 0, "scales are copied in whole chunks");

// Starts the copy of a quantized row of STRIDE bytes. If its SCALES bytes of scales are stored apart, they are copied
// behind it. Eight lanes copy a row. Null: zeros.
template <int STRIDE, int SCALES>
__device__ __forceinline__ void copy_quantized(uint32_t to, const uint8_t* data, const uint8_t* scales, int lane) {
    copy_row<STRIDE / 16>(to + lane % 8 * 16, data, lane);
    if (lane % 8 == 0 && SCALES == 8) cp_async_8(to + STRIDE, scales, scales != nullptr);
    if (lane % 8 == 0 && SCALES == 16) cp_async_16(to + STRIDE, scales, scales != nullptr);
    if (SCALES > 16) copy_row<SCALES / 16>(to + STRIDE + lane % 8 * 16, scales, lane);
}

// Starts the copy of a row to row `row` of the tile (bf16) or of the staging area (quantized). Eight lanes copy a row.
// `aligned`: every bf16 row begins at a multiple of 16 bytes; otherwise rows are copied value by value.
__device__ __forceinline__ void copy_to_stage(const Row& from, uint32_t stage, int row, int lane, bool aligned) {
    if constexpr (Row::QUANTIZED) {
        const uint32_t to = stage + row * Row::STAGED_BYTES;
        copy_quantized<ROW_STRIDE, Row::SCALES_BEHIND>(to, from.data, from.scales(), lane);
        return;
    }
    const uint32_t to = chunk_address(stage, row, lane % 8);
    if (aligned) {
        copy_row<ROW_CHUNKS>(to, from.data, lane);
        return;
    }
    const auto* values = reinterpret_cast<const bf16*>(from.data) + lane % 8 * 8;
#pragma unroll 1
    for (int i = 0; i < ROW_CHUNKS / 8; ++i) {
        uint32_t w[4] = {0, 0, 0, 0};
        if (from.data != nullptr) {
#pragma unroll
            for (int j = 0; j < 4; ++j) w[j] = values[64 * i + 2 * j] | uint32_t(values[64 * i + 2 * j + 1]) << 16;
        }
        store_shared_16(to + 128 * i, {w[0], w[1], w[2], w[3]});
    }
}
