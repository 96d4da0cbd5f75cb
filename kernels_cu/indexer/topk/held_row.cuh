// Rows that registers hold. Items are numbered warp by warp, in the order of their columns: the place of a chosen item
// is the number of chosen ones before it, by sums over lanes, warps and CTAs.
#pragma once
#include "indexer/topk/results.cuh"
#include "indexer/topk/threshold.cuh"

// Counts of a thread's set bits, 8 bits a vector.
struct Counts {
    uint32_t four[ceil_div(VECTORS, 4)];

    __device__ __forceinline__ int of(int v) const { return four[v / 4] >> (v % 4 * 8) & 255; }
};

// Which of a thread's items are chosen, and how many before them.
struct Chosen {
    uint32_t mask;  // bit 4 v + i: item i of vector v
    int before;     // chosen items of the warps and CTAs before this one
    int vectors;    // the others have nothing that is chosen

    // The numbers of set bits before each of a thread's vectors in its warp; and of all vectors.
    static __device__ __forceinline__ Counts before_vectors(uint32_t mask, Counts& totals) {
        Counts before;
#pragma unroll
        for (int j = 0; j < ceil_div(VECTORS, 4); ++j) {
            uint32_t counts = 0;
#pragma unroll
            for (int v = 0; v < 4; ++v) counts |= __popc(mask >> (16 * j + 4 * v) & 15) << (8 * v);
            const uint32_t sums = inclusive_sum(counts, threadIdx.x % 32);
            totals.four[j] = __shfl_sync(~0u, sums, 31);
            before.four[j] = sums - counts;
        }
        return before;
    }

    // Stores value_of(vector, item in it) of each chosen item of this thread at its place behind `to`.
    template <typename ValueOf>
    __device__ __forceinline__ void store(int32_t* to, ValueOf value_of) const {
        if (!__any_sync(~0u, mask != 0)) return;
        Counts totals;
        const Counts sums = before_vectors(mask, totals);
        to += before;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (may_end_before(v) && v >= vectors) break;
            int32_t* at = to + sums.of(v);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (mask >> (4 * v + i) & 1) *at++ = value_of(v, i);
            }
            to += totals.of(v);
        }
    }
};

// Called by the CTA.
__device__ __forceinline__ Chosen choose(const Items& items, const Threshold& threshold) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Not by Items::mask_of: with it every shape has other machine code, which was not timed.
    uint32_t larger = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i % 4 == 0 && may_end_before(i / 4) && i / 4 >= items.vectors) break;
        larger |= uint32_t(items[i] > threshold.order) << i;
    }
    if (threshold.ties > 0) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (i % 4 == 0 && may_end_before(i / 4) && i / 4 >= items.vectors) break;
            equal |= uint32_t(items[i] == threshold.order) << i;
        }
    }
    const Both of_warp = {uint32_t(__reduce_add_sync(~0u, __popc(larger) | __popc(equal) << 16))};
    if (lane == 0) shared().of_warp[warp] = of_warp.counts;
    __syncthreads();
    const uint32_t of_lane = lane < WARPS ? shared().of_warp[lane] : 0;
    const Both before = {__reduce_add_sync(~0u, lane < warp ? of_lane : 0) + threshold.before.counts};
    const int left = threshold.ties - before.equal();  // ties for this warp and those behind it
    if (left > 0 && of_warp.equal() != 0) {
        if (of_warp.equal() <= left) {
            larger |= equal;
        } else {  // some of them
            Counts totals;
            const Counts sums = Chosen::before_vectors(equal, totals);
            int number = 0;  // of equal items in vectors before
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const uint32_t in_vector = equal >> (i / 4 * 4) & ((1u << i % 4) - 1);
                const int place = number + sums.of(i / 4) + __popc(in_vector);
                if (equal >> i & 1 && place < left) larger |= 1u << i;
                if (i % 4 == 3) number += totals.of(i / 4);
            }
        }
    }
    return {larger, threshold.count(before), items.vectors};
}

// Behind choose: how many of the CTA are chosen.
__device__ __forceinline__ int count_chosen(const Threshold& threshold) {
    const int lane = threadIdx.x % 32;
    const uint32_t all = __reduce_add_sync(~0u, lane < WARPS ? shared().of_warp[lane] : 0);
    return threshold.count({all + threshold.before.counts}) - threshold.count(threshold.before);
}

// Chooses from a part of a row that registers hold: from a tile that begins at column `first`.
__device__ __forceinline__ void choose_held(const TopkParams& p, int row, const Range& of_row, const Range& range,
                                            int first, const Tile& tile) {
    const Shifts shifts(p, of_row, range);
    const bool by_shifts = shifts.count > 0 && of_row.begin % 4 == 0 && p.table.block_size.value % 4 == 0;
    const int32_t shift = by_shifts ? shifts.load(p, row) : 0;
    __syncthreads();  // bins are 0
    Items items;
    items.set(tile, range, first);
    if (by_shifts) shared().shifts[threadIdx.x] = shift;
    const Threshold threshold = find_threshold(items, p.k);
    end_reading_of_others();
    const auto column_of = [&](int v) { return first + Tile::first_of_vector(v); };
    const auto position_of = [&](int v) { return column_of(v) - of_row.begin; };
    const Chosen chosen = choose(items, threshold);
    wait_for_readers();
    const int place = CLUSTERS ? threshold.count(threshold.before) : 0;
    int32_t* const side_by_side = shared().chosen_columns - place;
    if (p.table.blocks == nullptr) {
        chosen.store(side_by_side, [&](int v, int i) { return position_of(v) + i; });
    } else if (by_shifts) {
        uint32_t slots[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) slots[v] = shifts.shifted(p, position_of(v));
        chosen.store(side_by_side, [&](int v, int i) { return Shifts::slot_of(slots[v] + i); });
    } else {
        chosen.store(side_by_side, [&](int v, int i) { return column_of(v) + i; });
    }
    __syncthreads();
    const int count = CLUSTERS ? count_chosen(threshold) : p.k;
    const Results results = results_of(p, row, of_row);
    if (p.table.blocks == nullptr || by_shifts) {
        results.copy(place, count);
    } else {
        results.store(p, place, count, [&](int i) { return shared().chosen_columns[i]; });
    }
}

// Loads a part that registers can hold, and chooses from it.
__device__ __forceinline__ void load_and_choose(const TopkParams& p, int row, const Range& of_row,
                                                const Range& range) {
    const int first = range.begin / 4 * 4;
    Tile tile;
    tile.load(p, row, range, first);
    choose_held(p, row, of_row, range, first, tile);
}

// The same, for kernels that are made for longer rows. Not inline: code in front of theirs would cost them time.
__device__ __noinline__ void load_and_choose_aside(const TopkParams& p, int row, Range of_row, Range range) {
    load_and_choose(p, row, of_row, range);
}
