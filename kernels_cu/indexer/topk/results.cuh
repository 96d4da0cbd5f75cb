// What is stored: positions, or slots by the row's block table.
#pragma once
#include "indexer/topk/items.cuh"
#include "ptx/global.cuh"

// Makes slots of the positions of a part of a row: a position's slot is the position plus the shift of its block, and
// -1 where that is negative. Shifts are in shared memory, one a thread at most.
struct Shifts {
    int first, count;  // blocks; count 0: slots are not made here

    __device__ __forceinline__ Shifts(const TopkParams& p, const Range& of_row, const Range& range)
        : first(0), count(0) {
        if (p.table.blocks == nullptr || range.begin >= range.end) return;
        first = divide(range.begin - of_row.begin, p.table.block_size);
        const int blocks = divide(range.end - 1 - of_row.begin, p.table.block_size) - first + 1;
        if (blocks <= THREADS) count = blocks;
    }

    // The shift of this thread's block.
    __device__ __forceinline__ int32_t load(const TopkParams& p, int row) const {
        const int number = first + threadIdx.x;
        if (threadIdx.x >= count || number >= p.table.width) return NO_SLOT;
        const int32_t* const blocks = blocks_of_row(p, row);
        const int32_t slot = blocks == nullptr ? -1 : slot_in_block(p.table, blocks[number], 0);
        return slot < 0 ? NO_SLOT : int32_t(slot - number * p.table.block_size.value);
    }

    __device__ __forceinline__ uint32_t shifted(const TopkParams& p, int32_t position) const {
        return position + shared().shifts[min(divide(position, p.table.block_size) - first, count - 1)];
    }
    static __device__ __forceinline__ int32_t slot_of(uint32_t shifted) { return max(int32_t(shifted), -1); }
};

// Where results go: `place` counts from 0.
struct Results {
    int32_t* to;
    int32_t start;          // subtracted from columns
    const int32_t* blocks;  // the request's row of the block table; null: positions

    __device__ __forceinline__ int32_t position_of(int32_t column) const { return column - start; }
    __device__ __forceinline__ int32_t slot_of(const TopkParams& p, int32_t column) const {
        const Position at = find_position(p.table, column - start);
        return blocks != nullptr && at.column >= 0 ? slot_in_block(p.table, blocks[at.column], at.offset) : -1;
    }

    // Stores what stands side by side in shared memory, from `place` on. Called by the CTA.
    __device__ __forceinline__ void copy(int place, int count) const {
        const int32_t* const from = shared().chosen_columns;
        int32_t* const there = to + place;
        const int fours = reinterpret_cast<uint64_t>(there) % 16 == 0 ? count / 4 : 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < fours; i += THREADS) {
            reinterpret_cast<uint4*>(there)[i] = reinterpret_cast<const uint4*>(from)[i];
        }
#pragma unroll 1
        for (int i = 4 * fours + threadIdx.x; i < count; i += THREADS) there[i] = from[i];
    }

    // Stores what becomes of column_of(0), column_of(1) and so on, from `place` on. Called by the CTA.
    template <typename ColumnOf>
    __device__ __forceinline__ void store(const TopkParams& p, int place, int count, ColumnOf column_of) const {
        constexpr int AT_A_TIME = 4;  // reads of the block table under way
        for (int first = threadIdx.x; first < count; first += AT_A_TIME * THREADS) {
            int32_t result[AT_A_TIME];
#pragma unroll
            for (int j = 0; j < AT_A_TIME; ++j) {
                const int32_t column = column_of(min(first + j * THREADS, count - 1));
                result[j] = p.table.blocks == nullptr ? position_of(column) : slot_of(p, column);
            }
#pragma unroll
            for (int j = 0; j < AT_A_TIME; ++j) {
                const int i = first + j * THREADS;
                if (i < count) to[place + i] = result[j];
            }
        }
    }
};

__device__ __forceinline__ Results results_of(const TopkParams& p, int row, const Range& range) {
    const int32_t* const blocks = p.table.blocks == nullptr ? nullptr : blocks_of_row(p, row);
    return {p.out + row * p.out_stride, range.begin, blocks};
}
