// How chosen columns become results, positions or slots by the row's block table, and are stored.
#pragma once
#include "indexer/topk/items.cuh"
#include "ptx/global.cuh"

// Makes slots of the positions of a part, without a read of the block table for each of them: the slot is the position
// plus the shift of the position's block, or -1 where that is negative. The CTA keeps the shifts of all blocks that
// the part touches in shared memory. Each thread loads one of them, while logits are under way.
struct Shifts {
    int first, count;  // the part's blocks; count 0: positions are results, or the blocks are more than threads

    __device__ __forceinline__ Shifts(const TopkParams& p, const Range& of_row, const Range& range)
        : first(0), count(0) {
        if (p.table.blocks == nullptr || range.begin >= range.end) return;
        first = divide(range.begin - of_row.begin, p.table.block_size);
        const int blocks = divide(range.end - 1 - of_row.begin, p.table.block_size) - first + 1;
        if (blocks <= THREADS) count = blocks;
    }

    // Loads the shift of this thread's block.
    __device__ __forceinline__ int32_t load(const TopkParams& p, int row) const {
        const int number = first + threadIdx.x;
        if (threadIdx.x >= count || number >= p.table.width) return NO_SLOT;
        const int32_t* const blocks = blocks_of_row(p, row);
        const int32_t slot = blocks == nullptr ? -1 : slot_in_block(p.table, blocks[number], 0);
        return slot < 0 ? NO_SLOT : int32_t(slot - number * p.table.block_size.value);
    }

    // A position plus its block's shift. `slot_of` makes a slot of it, or of the sum with an offset in the block.
    __device__ __forceinline__ uint32_t shifted(const TopkParams& p, int32_t position) const {
        return position + shared().slot_shifts[min(divide(position, p.table.block_size) - first, count - 1)];
    }
    static __device__ __forceinline__ int32_t slot_of(uint32_t shifted) { return max(int32_t(shifted), -1); }
};

// A row's results in memory. Result `place` is `to[place]`.
struct Results {
    int32_t* to;
    int32_t start;          // the range's first column: position 0
    const int32_t* blocks;  // the request's row of the block table; null: positions

    __device__ __forceinline__ int32_t position_of(int32_t column) const { return column - start; }
    __device__ __forceinline__ int32_t slot_of(const TopkParams& p, int32_t column) const {
        const Position at = find_position(p.table, column - start);
        return blocks != nullptr && at.column >= 0 ? slot_in_block(p.table, blocks[at.column], at.offset) : -1;
    }

    // Copies `count` results from shared().chosen_columns to `place` and behind it. Called by the CTA.
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

    // Makes results of column_of(0) to column_of(count - 1), and stores them to `place` and behind it. Called by the
    // CTA.
    template <typename ColumnOf>
    __device__ __forceinline__ void store(const TopkParams& p, int place, int count, ColumnOf column_of) const {
        constexpr int AT_A_TIME = 4;  // reads of the block table of a thread that are under way together
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
