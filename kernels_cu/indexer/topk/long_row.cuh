// Rows that registers do not hold.
//
//   sample    guess_threshold   a logit that somewhat more than k of the row are larger than
//   pool      fill_pool         those, from memory into shared memory, and from there into registers
//             find_threshold    the order of the k-th largest among them
//   columns   ORDERED: bring_pooled_in_order (pool_order.cuh), else bring_in_order (marks.cuh)
//
// A pool of less than k, or of more than it holds, is of no use: the sample misled. Then find_threshold and
// bring_in_order read the row from memory (InMemory).
#pragma once
#include "indexer/topk/marks.cuh"
#include "indexer/topk/pool_order.cuh"
#include "indexer/topk/results.cuh"
#include "indexer/topk/sample.cuh"

// A part of a row that is read from memory in each pass: for rows of which a sample told too little.
struct InMemory {
    const TopkParams& p;
    int row;
    Range range;

    // Calls act(order, column) for each item of this thread from `begin` to before `end`.
    template <typename Act>
    __device__ __forceinline__ void for_columns(int begin, int end, Act act) const {
        constexpr int DEPTH = 2;
        const int64_t start = row * p.logits_stride;
        const Range inside = {max(begin, range.begin), min(end, range.end)};
        for (int first = inside.begin / 4 * 4; first < inside.end; first += DEPTH * THREADS * 4) {
            float4 vector[DEPTH];
#pragma unroll
            for (int v = 0; v < DEPTH; ++v) {
                vector[v] = logits_inside(p, start, first + (v * THREADS + threadIdx.x) * 4, inside, 0);
            }
#pragma unroll
            for (int v = 0; v < DEPTH; ++v) {
                const float of_vector[4] = {vector[v].x, vector[v].y, vector[v].z, vector[v].w};
                const int at = first + (v * THREADS + threadIdx.x) * 4;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (inside.begin <= at + i && at + i < inside.end) act(order_of(of_vector[i]), at + i);
                }
            }
        }
    }
    template <typename Act>
    __device__ __forceinline__ void for_each(Act act) const {
        for_columns(range.begin, range.end, [&](uint32_t order, int) { act(order); });
    }
};

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
