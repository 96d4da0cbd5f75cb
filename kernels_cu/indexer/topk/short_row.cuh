// Results of rows of at most k items, all of which are chosen: positions 0, 1, 2 and so on, or their slots, and -1 from the
// row's length up to k.
#pragma once
#include "indexer/topk/params.cuh"
#include "ptx/global.cuh"

// Four neighbouring results, from `at` on, of a row of `count` items.
__device__ __forceinline__ void store_four(int32_t* to, int at, const int32_t (&result)[4], int count, int k) {
    uint32_t stored[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) stored[i] = at + i < count ? result[i] : -1;
    if (at + 4 <= k && reinterpret_cast<uint64_t>(to) % 16 == 0) {
        store_16(to + at, {stored[0], stored[1], stored[2], stored[3]});
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (at + i < k) to[at + i] = stored[i];
    }
}

// Four neighbouring positions as results.
struct FourPositions {
    int at;

    __device__ __forceinline__ void load(const BlockTable&, const int32_t*, int first) { at = first; }
    __device__ __forceinline__ void store(const BlockTable&, int32_t* to, int count, int k) const {
        store_four(to, at, {at, at + 1, at + 2, at + 3}, count, k);
    }
};

// Their slots.
struct FourSlots {
    int at;
    int32_t block[4], offset[4];

    // Loads the blocks of the positions from the request's row of the block table, which takes no length of the row.
    __device__ __forceinline__ void load(const BlockTable& table, const int32_t* blocks, int first) {
        at = first;
        const bool in_one = table.block_size.value % 4 == 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i > 0 && in_one) {
                block[i] = block[0];
                offset[i] = offset[0] + i;
                continue;
            }
            const int32_t column = divide(at + i, table.block_size);
            block[i] = blocks != nullptr && column < table.width ? blocks[column] : -1;
            offset[i] = at + i - column * int32_t(table.block_size.value);
        }
    }
    __device__ __forceinline__ void store(const BlockTable& table, int32_t* to, int count, int k) const {
        int32_t slots[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) slots[i] = slot_in_block(table, block[i], offset[i]);
        store_four(to, at, slots, count, k);
    }
};
