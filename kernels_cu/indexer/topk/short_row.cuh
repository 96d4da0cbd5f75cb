// Results of rows of at most k items: positions 0, 1, 2 and so on, or the slots of these, then -1 up to k.
#pragma once
#include "indexer/topk/params.cuh"
#include "ptx/global.cuh"

// Stores results `at` to `at` + 3 of a row of `count` items.
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

// Results `first` to `first` + 3 as positions. FourPositions and FourSlots have the same members, for callers that are
// templates.
struct FourPositions {
    int at;

    __device__ __forceinline__ void load(const BlockTable&, const int32_t*, int first) { at = first; }
    __device__ __forceinline__ void store(const BlockTable&, int32_t* to, int count, int k) const {
        store_four(to, at, {at, at + 1, at + 2, at + 3}, count, k);
    }
};

// The same results as slots.
struct FourSlots {
    int at;
    int32_t block[4], offset[4];

    // Loads the positions' entries of `blocks`, the request's row of the block table. It does not need the row's
    // length: the load of that can be under way at the same time.
    __device__ __forceinline__ void load(const BlockTable& table, const int32_t* blocks, int first) {
        at = first;
        const bool in_one_block = table.block_size.value % 4 == 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i > 0 && in_one_block) {
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
