// The k largest logits of each row's range, exact: of equal ones those with lower indices, ascending by position.
//
// A logit's *order* is an integer that is larger for larger logits: 0 outside the range, 1 for NaN, equal for both
// zeros. Everything is done with orders.
//
//   CTA        a row; with CLUSTERS, the CTAs of a cluster have a part of the row each
//     short row  ITEMS items a thread hold it in registers
//     long row   STREAMED: a sample of the row tells a logit that somewhat more than k of it are larger than.
//                Those go from memory into a pool in shared memory, in any order, and from there into registers. If the
//                pool gets less than k or more than it holds (the sample misled), each step below reads the row again.
//                ORDERED, more than 256 threads: the sample is searched by finer digits
//   find_threshold   the order of the k-th largest by radix: a histogram of the upper 11 bits, then of 11 and of 10
//                    more bits of the items that agree with it so far. A cluster's histograms are added up
//                    ORDERED: of few items that agree in two digits, a list, and each is compared with all
//   in order   short row: items are numbered part by part, warp by warp; the place of a chosen one is the number of
//              chosen ones before it, by sums over lanes, warps and CTAs. A CTA's are brought side by side in shared
//              memory first
//              long row: a bit of shared memory a column is set where an item is chosen. By the sums of bits before, a
//              thread brings the columns of a stretch of bits to their places in shared memory
//              ORDERED: the pool has the items of a chunk of columns side by side, ascending. Sums over the pool, and
//              over the chunks in the order of their columns, tell the places
//   results    positions, or with a block table slots: short rows add to four neighbouring columns what is kept
//              of their block in shared memory, long ones look up a block for each that is chosen
//
// No atomics decide about places, so results do not depend on timing. Of rows no longer than k all is chosen, whatever
// their logits are; where no row may be longer, `short_rows` runs instead. FEW, rows in registers that begin at column
// 0: all columns are loaded while the row's end is still being read. ORDERED: many long rows of at most 2^20 columns.
// BF16: logits are bfloat16.
//
// Shared memory: 8 bytes an item of the pool, 8 KB a histogram (a cluster has three), 4 bytes a thread for blocks or 4 a
// chunk, and a few words a warp. Bits or ranks take the pool's place, chosen columns or results that of histograms.
#include "indexer/topk/long_row.cuh"
#include "indexer/topk/results.cuh"
#include "indexer/topk/short_row.cuh"
#include "ptx/griddepcontrol.cuh"

template <typename Four>
__device__ __forceinline__ void store_all(const BlockTable& table, const int32_t* blocks, int32_t* to, int count,
                                          int k) {
#pragma unroll 1
    for (int at = threadIdx.x * 4; at < k; at += THREADS * 4) {
        Four four;
        four.load(table, blocks, at);
        four.store(table, to, count, k);
    }
}

// All of a row of at most k items are chosen. Not inline: its code would stand in front of the other rows'. What it takes
// of the parameters it takes by value: through a reference to these each would be loaded from memory.
__device__ __noinline__ void choose_all(BlockTable table, const int32_t* requests, int queries, int row, int32_t* to,
                                        int count, int k) {
    if (table.blocks == nullptr) {
        store_all<FourPositions>(table, nullptr, to, count, k);
    } else {
        store_all<FourSlots>(table, blocks_of_row(table, requests, queries, row), to, count, k);
    }
}

// Whether the pools of the row's CTAs hold at least k items, all that were brought there. Called by all CTAs.
__device__ __forceinline__ bool pools_suffice(int count, int k) {
    if constexpr (!CLUSTERS) return k <= count && count <= CAPACITY;
    cluster_sync();
    const int lane = threadIdx.x % 32, parts = num_parts();
    const int of_part = lane < parts ? load_cluster_4(cluster_address(shared_address(&shared().pooled), lane)) : 0;
    return __reduce_add_sync(~0u, of_part) >= k && !__any_sync(~0u, of_part > CAPACITY);
}

// Stores what bring_in_order left in shared memory.
__device__ __forceinline__ void store_chosen(const TopkParams& p, int row, const Range& of_row,
                                             const Threshold& threshold, int count) {
    const Results results = results_of(p, row, of_row);
    results.store(p, threshold.count(threshold.before), count, [&](int i) { return shared().chosen_columns[i]; });
}

// Chooses from a part of a row of which the sample told too little. Not inline, as it is rare.
__device__ __noinline__ void choose_in_memory(const TopkParams& p, int row, Range of_row, Range range) {
    const InMemory items = {p, row, range};
    const Threshold threshold = find_threshold(items, p.k);
    end_reading_of_others();
    wait_for_readers();
    const uint32_t least = threshold.order + (threshold.ties == 0);
    const int count = bring_in_order(range, threshold, [&](int begin, int end) {
        items.for_columns(begin, end, [&](uint32_t order, int column) {
            mark_if(order >= least, order == threshold.order, column - begin);
        });
    });
    store_chosen(p, row, of_row, threshold, count);
}

// Chooses from a part of a row that registers do not hold. The first step's logits are on their way with the sample's.
__device__ __forceinline__ void choose_streamed(const TopkParams& p, int row, const Range& of_row,
                                                const Range& range) {
    Sample sample;
    sample.load(p, row, of_row);
    Step step;
    step.load(p, row * p.logits_stride, range, range.begin / 4 * 4);
    __syncthreads();  // bins are 0
    const int pooled = fill_pool(p, row, range, guess_threshold(p, of_row, sample), step);
    if (pools_suffice(pooled, p.k)) {
        Items items;
        items.set_pooled(pooled);
        const Threshold threshold = find_threshold(items, p.k);
        end_reading_of_others();
        wait_for_readers();
#if ORDERED
        const bool positions = p.table.blocks == nullptr;
        const int count = bring_pooled_in_order(items, range, threshold, positions ? of_row.begin : 0);
        if (positions) {
            results_of(p, row, of_row).copy(0, count);
        } else {
            store_chosen(p, row, of_row, threshold, count);
        }
#else
        const uint32_t least = threshold.order + (threshold.ties == 0);
        const int count = bring_in_order(range, threshold, [&](int begin, int end) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                if (v >= items.vectors) break;
                const uint4 four = *reinterpret_cast<const uint4*>(&shared().columns[Items::first_in_pool(v)]);
                const uint32_t columns[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t order = items.order[v][i], column = columns[i] - begin;
                    mark_if(order >= least && column < uint32_t(end - begin), order == threshold.order, column);
                }
            }
        });
        store_chosen(p, row, of_row, threshold, count);
#endif
    } else {
        choose_in_memory(p, row, of_row, range);
    }
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

// The same, for the kernels that are not made for it. Not inline: code in front of theirs would cost them time.
__device__ __noinline__ void load_and_choose_aside(const TopkParams& p, int row, Range of_row, Range range) {
    load_and_choose(p, row, of_row, range);
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) topk(const __grid_constant__ TopkParams p) {
    let_next_kernel_start();
    const int parts = num_parts(), part = this_part(), row = blockIdx.x / parts;
    for (Histogram& bins : shared().bins) clear(bins);
    if (threadIdx.x == 0) shared().pooled = 0;
#if ORDERED
    if (threadIdx.x == 0) shared().listed = 0;
#endif
    wait_for_earlier_kernels();
    Tile tile;
    const bool early = FEW && !STREAMED && p.starts == nullptr;
    if (early) tile.load(p, row, {0, p.width}, 0);
    const Range of_row = columns_of_row(p, row);
    const int length = of_row.end - of_row.begin;
    if (length <= p.k) {
        if (part == 0) choose_all(p.table, p.requests, p.queries, row, p.out + row * p.out_stride, length, p.k);
        return;
    }
    const Range range = part_of(of_row, part, parts);
    if constexpr (STREAMED) {
        if (ceil_div(length, parts) + 8 > TILE) {
            choose_streamed(p, row, of_row, range);
        } else {
            load_and_choose_aside(p, row, of_row, range);
        }
    } else if constexpr (FEW) {
        if (early) {
            const Range from_0 = {0, of_row.end};
            choose_held(p, row, from_0, from_0, 0, tile);
        } else {
            load_and_choose_aside(p, row, of_row, range);
        }
    } else {
        load_and_choose(p, row, of_row, range);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = sizeof(Shared);
