// Staged FP8 rows to bf16 rows of a tile. Every e4m3 value, and every power of two times one, is exact in bfloat16.
#pragma once
#include "ptx/convert.cuh"
#include "tile/row_tile.cuh"

// A thread does 8 values of every (THREADS / 64)-th row, always in the same columns, so that addresses are constants
// away from one another. `scale_of(row address, chunk)` gives the power of two that a chunk of 8 values is multiplied
// with.
template <int ROWS, int THREADS, int STAGED_BYTES, typename Scale>
__device__ __forceinline__ void dequantize_rows(uint32_t staged, uint32_t tile, Scale scale_of) {
    constexpr int NOPE_CHUNKS = D_NOPE / 8, ROPE_CHUNKS = D_ROPE / 8, STEP = THREADS / 64;
    static_assert(NOPE_CHUNKS <= 64 && ROWS * ROPE_CHUNKS % THREADS == 0, "");
    const int chunk = threadIdx.x % 64, first = threadIdx.x / 64;
    if (chunk < NOPE_CHUNKS) {
#pragma unroll 4
        for (int row = first; row < ROWS; row += STEP) {
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
    }
#pragma unroll 1
    for (int item = threadIdx.x; item < ROWS * ROPE_CHUNKS; item += THREADS) {
        const int row = item / ROPE_CHUNKS, rope = item % ROPE_CHUNKS;
        store_shared(chunk_address(tile, row, NOPE_CHUNKS + rope),
                     load_shared_16(staged + row * STAGED_BYTES + ROPE_OFFSET + 16 * rope));
    }
}
