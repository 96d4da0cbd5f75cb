// Rows on their way into a tile of bf16 rows, every layout. bf16 rows are copied into the tile itself. FP8 rows are
// copied to a staging area as they lie in the cache and widened from there: every e4m3 value, and every power of two
// times one, is exact in bfloat16.
#pragma once
#include "ptx/shared.cuh"
#include "rows/quantize.cuh"
#include "rows/reader.cuh"
#include "tile/copy_row.cuh"
#include "tile/row_tile.cuh"

// Start the copy of a row to row `row` of the tile (bf16) or of the staging area (FP8). Eight lanes copy a row.
// `aligned`: every bf16 row starts at a multiple of 16 bytes; other rows are copied value by value.
__device__ __forceinline__ void copy_to_stage(const Row& from, uint32_t stage, int row, int lane, bool aligned) {
    if constexpr (Row::QUANTIZED) {
        const uint32_t to = stage + row * Row::STAGED_BYTES;
        copy_row<ROW_STRIDE / 16>(to + lane % 8 * 16, from.data, lane);
        if constexpr (Row::FOLDED_SCALES == 0) {
            if (lane % 8 == 0) cp_async_8(to + ROW_STRIDE, from.scales(), from.scales() != nullptr);
        }
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

// Widens ROWS staged FP8 rows to rows of the tile. A thread does 8 values of every (THREADS / 64)-th row, always of
// the same columns, so that addresses differ by constants. `scale_of(row address, chunk)` is the power of two that a
// chunk of 8 values is multiplied with.
template <int ROWS, int THREADS, typename Scale>
__device__ __forceinline__ void widen_rows(uint32_t stage, uint32_t tile, Scale scale_of) {
    constexpr int NOPE_CHUNKS = D_NOPE / 8, ROPE_CHUNKS = D_ROPE / 8, STEP = THREADS / 64;
    static_assert(NOPE_CHUNKS <= 64 && ROWS * ROPE_CHUNKS % THREADS == 0, "");
    const int chunk = threadIdx.x % 64, first = threadIdx.x / 64;
    if (chunk < NOPE_CHUNKS) {
#pragma unroll 4
        for (int row = first; row < ROWS; row += STEP) {
            const uint32_t from = stage + row * Row::STAGED_BYTES;
            const Vec8 codes = load_shared_8(from + 8 * chunk);
            const Vec16 values = dequantize_8(codes, scale_of(from, chunk));
            store_shared_16(chunk_address(tile, row, chunk), values);
        }
    }
#pragma unroll 1
    for (int item = threadIdx.x; item < ROWS * ROPE_CHUNKS; item += THREADS) {
        const int row = item / ROPE_CHUNKS, rope = item % ROPE_CHUNKS;
        store_shared_16(chunk_address(tile, row, NOPE_CHUNKS + rope),
                        load_shared_16(stage + row * Row::STAGED_BYTES + ROPE_OFFSET + 16 * rope));
    }
}

// Staged FP8 rows to the tile. V32_FP8: values are not scaled; the scales go to `scales`, [FOLDED_SCALES][ROWS]
// float32.
template <int ROWS, int THREADS>
__device__ __forceinline__ void dequantize_stage(uint32_t stage, uint32_t tile, uint32_t scales) {
    if constexpr (Row::FOLDED_SCALES > 0) {
        widen_rows<ROWS, THREADS>(stage, tile, [](uint32_t, int) { return 1.0f; });
        if (threadIdx.x < ROWS) {
            const Vec16 four = load_shared_16(stage + threadIdx.x * Row::STAGED_BYTES + SCALE_OFFSET);
            const uint32_t words[] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < Row::FOLDED_SCALES; ++i)
                store_shared_4(scales + (i * ROWS + threadIdx.x) * 4, words[i]);
        }
    } else {
        widen_rows<ROWS, THREADS>(stage, tile, [](uint32_t row, int chunk) {
            return ue8m0_to_float(load_shared_byte(row + ROW_STRIDE + chunk / (SCALE_TILE / 8)));
        });
    }
}
