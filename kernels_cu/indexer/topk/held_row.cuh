// Parts that registers hold. Items are numbered warp by warp, in the order of their columns (Tile). So an item's place
// among the results is the number of chosen items before it, which sums over lanes, warps and CTAs tell.
#pragma once
#include "indexer/topk/results.cuh"
#include "indexer/topk/threshold.cuh"

// A number for each vector of a thread, a byte each.
struct VectorCounts {
    uint32_t packed[ceil_div(VECTORS, 4)];

    __device__ __forceinline__ int of(int v) const { return packed[v / 4] >> (v % 4 * 8) & 255; }
};

// Which of a thread's items are chosen, and how many chosen items come before.
struct Chosen {
    uint32_t mask;  // bit 4 v + i: item i of vector v
    int before;     // chosen items of the warps and CTAs before this one
    int vectors;    // those behind have no chosen items

    // For each vector v of the warp: the number of items in `mask` of the lanes before this one, and in `totals` that
    // of all lanes.
    static __device__ __forceinline__ VectorCounts before_lane(uint32_t mask, VectorCounts& totals) {
        VectorCounts before;
#pragma unroll
        for (int j = 0; j < ceil_div(VECTORS, 4); ++j) {
            uint32_t counts = 0;
#pragma unroll
            for (int v = 0; v < 4; ++v) counts |= __popc(mask >> (16 * j + 4 * v) & 15) << (8 * v);
            const uint32_t sums = inclusive_sum(counts, threadIdx.x % 32);
            totals.packed[j] = __shfl_sync(~0u, sums, 31);
            before.packed[j] = sums - counts;
        }
        return before;
    }

    // Stores value_of(vector, item in it) of each chosen item of this thread at its place behind `to`.
    template <typename ValueOf>
    __device__ __forceinline__ void store(int32_t* to, ValueOf value_of) const {
        if (!__any_sync(~0u, mask != 0)) return;
        VectorCounts totals;
        const VectorCounts in_vector = before_lane(mask, totals);
        to += before;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (checks_end_at(v) && v >= vectors) break;
            int32_t* at = to + in_vector.of(v);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (mask >> (4 * v + i) & 1) *at++ = value_of(v, i);
            }
            to += totals.of(v);
        }
    }
};

// Leaves the numbers of this CTA's larger and equal items in shared().warp_sums, for count_chosen. Called by the CTA.
__device__ __forceinline__ Chosen choose_items(const Items& items, const Threshold& threshold) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Not by Items::mask_of: that gives other machine code, which was not timed.
    uint32_t chosen = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i % 4 == 0 && checks_end_at(i / 4) && i / 4 >= items.vectors) break;
        chosen |= uint32_t(items[i] > threshold.key) << i;
    }
    if (threshold.ties > 0) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (i % 4 == 0 && checks_end_at(i / 4) && i / 4 >= items.vectors) break;
            equal |= uint32_t(items[i] == threshold.key) << i;
        }
    }
    const LargerEqual of_warp = {uint32_t(__reduce_add_sync(~0u, __popc(chosen) | __popc(equal) << 16))};
    if (lane == 0) shared().warp_sums[warp] = of_warp.packed;
    __syncthreads();
    const uint32_t of_lane = lane < WARPS ? shared().warp_sums[lane] : 0;
    const LargerEqual before = {__reduce_add_sync(~0u, lane < warp ? of_lane : 0) + threshold.before.packed};
    const int ties_left = threshold.ties - before.equal();  // for this warp and those behind it
    if (ties_left > 0 && of_warp.equal() != 0) {
        if (of_warp.equal() <= ties_left) {
            chosen |= equal;
        } else {  // the first ties_left of the warp's equal items
            VectorCounts totals;
            const VectorCounts in_vector = Chosen::before_lane(equal, totals);
            int before_vector = 0;  // equal items in the warp's vectors before
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const uint32_t before_item = equal >> (i / 4 * 4) & ((1u << i % 4) - 1);
                const int number = before_vector + in_vector.of(i / 4) + __popc(before_item);
                if (equal >> i & 1 && number < ties_left) chosen |= 1u << i;
                if (i % 4 == 3) before_vector += totals.of(i / 4);
            }
        }
    }
    return {chosen, threshold.num_chosen(before), items.vectors};
}

// Behind choose_items: how many items of this CTA are chosen.
__device__ __forceinline__ int count_chosen(const Threshold& threshold) {
    const int lane = threadIdx.x % 32;
    const uint32_t all = __reduce_add_sync(~0u, lane < WARPS ? shared().warp_sums[lane] : 0);
    return threshold.num_chosen({all + threshold.before.packed}) - threshold.num_chosen(threshold.before);
}

// Chooses from a part of which a tile, from column `first` on, holds all logits.
__device__ __forceinline__ void choose_held(const TopkParams& p, int row, const Range& of_row, const Range& range,
                                            int first, const Tile& tile) {
    const Shifts shifts(p, of_row, range);
    // Vectors begin at multiples of 4, as do blocks then: all positions of a vector lie in one block.
    const bool by_shifts = shifts.count > 0 && of_row.begin % 4 == 0 && p.table.block_size.value % 4 == 0;
    const int32_t shift = by_shifts ? shifts.load(p, row) : 0;
    __syncthreads();  // bins are 0
    Items items;
    items.set(tile, range, first);
    if (by_shifts) shared().slot_shifts[threadIdx.x] = shift;
    const Threshold threshold = find_threshold(items, p.k);
    end_reading_of_others();
    const auto column_of = [&](int v) { return first + Tile::first_of_vector(v); };
    const auto position_of = [&](int v) { return column_of(v) - of_row.begin; };
    const Chosen chosen = choose_items(items, threshold);
    wait_for_readers();
    const int place = CLUSTERS ? threshold.num_chosen(threshold.before) : 0;  // of this CTA's first result in the row
    int32_t* const staged = shared().chosen_columns - place;  // where this CTA stages result 0 of the row
    if (p.table.blocks == nullptr) {
        chosen.store(staged, [&](int v, int i) { return position_of(v) + i; });
    } else if (by_shifts) {
        uint32_t slots[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) slots[v] = shifts.shifted(p, position_of(v));
        chosen.store(staged, [&](int v, int i) { return Shifts::slot_of(slots[v] + i); });
    } else {
        chosen.store(staged, [&](int v, int i) { return column_of(v) + i; });
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

// The same, for STREAMED variants. Not inlined: code in front of that for their longer rows would cost them time.
__device__ __noinline__ void load_and_choose_out_of_line(const TopkParams& p, int row, Range of_row, Range range) {
    load_and_choose(p, row, of_row, range);
}
