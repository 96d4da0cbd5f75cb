// Staged FP8 rows to bf16 rows of a tile: value = float(e4m3) * scale, rounded to bf16 once.
#pragma once
#include "ptx/convert.cuh"
#include "tile/row_tile.cuh"

// Eight values a thread and turn. `scale_of(row address, chunk)` gives the float32 scale of a chunk of 8 values.
template <int ROWS, int THREADS, int STAGED_BYTES, typename Scale>
__device__ __forceinline__ void dequantize_rows(uint32_t staged, uint32_t tile, Scale scale_of) {
    constexpr int NOPE_CHUNKS = D_NOPE / 8, ROPE_CHUNKS = D_ROPE / 8;
#pragma unroll 2
    for (int i = 0; i < ceil_div(ROWS * NOPE_CHUNKS, THREADS); ++i) {
        const int item = i * THREADS + threadIdx.x, row = item / NOPE_CHUNKS, chunk = item % NOPE_CHUNKS;
        if (ROWS * NOPE_CHUNKS % THREADS != 0 && item >= ROWS * NOPE_CHUNKS) break;
        const uint32_t from = staged + row * STAGED_BYTES;
        const Vec8 bytes = load_shared_8(from + 8 * chunk);
        const float scale = scale_of(from, chunk);
        float lo[4], hi[4];
        e4m3x4_to_float(bytes.x, lo);
        e4m3x4_to_float(bytes.y, hi);
        store_shared(chunk_address(tile, row, chunk),
                     {pack_bf16x2(lo[0] * scale, lo[1] * scale), pack_bf16x2(lo[2] * scale, lo[3] * scale),
                      pack_bf16x2(hi[0] * scale, hi[1] * scale), pack_bf16x2(hi[2] * scale, hi[3] * scale)});
    }
#pragma unroll 1
    for (int item = threadIdx.x; item < ROWS * ROPE_CHUNKS; item += THREADS) {
        const int row = item / ROPE_CHUNKS, chunk = item % ROPE_CHUNKS;
        store_shared(chunk_address(tile, row, NOPE_CHUNKS + chunk),
                     load_shared_16(staged + row * STAGED_BYTES + ROPE_OFFSET + 16 * chunk));
    }
}
