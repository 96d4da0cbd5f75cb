// Layout BF16: a row is D_QK bfloat16 and goes straight into the tile.
#pragma once
#include "tile/gather.cuh"
#include "tile/row_tile.cuh"

struct Rows {
    static constexpr bool QUANTIZED = false;
    static constexpr int STAGED_BYTES = 0;

    const uint8_t* data;

    static __device__ __forceinline__ Rows row_of(const Source& s, int32_t slot) {
        const Slot at = find_slot(s, slot);
        return {at.block + int64_t(at.offset) * s.row_stride};
    }

    static __device__ __forceinline__ Rows none() { return {nullptr}; }

    // `aligned`: every row starts at a multiple of 16 bytes. Rows that do not are copied item by item.
    template <int ROWS>
    static __device__ __forceinline__ void gather(uint32_t tile, int first, Rows mine, bool aligned) {
        if (aligned) {
            gather_chunks<ROWS, ROW_CHUNKS>(mine.data, [&](int r, int c) { return chunk_address(tile, first + r, c); });
            return;
        }
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int piece = lane; piece < ceil_div(ROWS * ROW_CHUNKS, 32) * 32; piece += 32) {
            const int r = piece / ROW_CHUNKS, c = piece % ROW_CHUNKS;
            const auto* from = reinterpret_cast<const bf16*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(mine.data), r));
            if (piece >= ROWS * ROW_CHUNKS) continue;
            uint32_t w[4] = {0, 0, 0, 0};
            if (from != nullptr) {
#pragma unroll
                for (int i = 0; i < 4; ++i) w[i] = from[8 * c + 2 * i] | uint32_t(from[8 * c + 2 * i + 1]) << 16;
            }
            store_shared(chunk_address(tile, first + r, c), {w[0], w[1], w[2], w[3]});
        }
    }

    // Rows are never staged.
    template <int ROWS, int THREADS>
    static __device__ __forceinline__ void dequantize(uint32_t, uint32_t) {}
};
