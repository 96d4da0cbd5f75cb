// Parts that registers do not hold.
//
//   sample.cuh      Sample, guess_cutoff     a logit that somewhat more than k logits of the row are larger than
//   pool.cuh        fill_pool                the logits above it, from memory into shared memory
//   threshold.cuh   find_threshold           the key of the k-th largest of the pool, which registers now hold
//   marks.cuh       collect_by_column        the chosen columns of the pool, ascending
//   pool_order.cuh  collect_pool_by_column   the same with ORDERED
//
// A pool of fewer than k items, or of more than it has room for, is of no use: the sample misled. Then find_threshold
// and collect_by_column read the part from memory, in each pass and for each window anew (RowInMemory).
#pragma once
#include "indexer/topk/marks.cuh"
#include "indexer/topk/pool_order.cuh"
#include "indexer/topk/results.cuh"
#include "indexer/topk/sample.cuh"

// The items of a part that is read from memory whenever they are needed.
struct RowInMemory {
    const TopkParams& p;
    int row;
    Range range;

    // Calls act(key, column) for each item of this thread in columns [begin, end).
    template <typename Act>
    __device__ __forceinline__ void for_columns(int begin, int end, Act act) const {
        constexpr int DEPTH = 2;  // vectors whose loads are under way together
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
                    if (inside.begin <= at + i && at + i < inside.end) act(radix_key_of(of_vector[i]), at + i);
                }
            }
        }
    }
    template <typename Act>
    __device__ __forceinline__ void for_each(Act act) const {
        for_columns(range.begin, range.end, [&](uint32_t key, int) { act(key); });
    }
};

// Whether the pools of the row's CTAs hold at least k items together, and each had room for all of its `count` items.
// Called by all threads of these CTAs.
__device__ __forceinline__ bool pools_suffice(int count, int k) {
    if constexpr (!CLUSTERS) return k <= count && count <= POOL_CAPACITY;
    cluster_sync();
    const int lane = threadIdx.x % 32, parts = num_parts();
    const int of_part = lane < parts ? load_cluster_4(cluster_address(shared_address(&shared().num_pooled), lane)) : 0;
    return __reduce_add_sync(~0u, of_part) >= k && !__any_sync(~0u, of_part > POOL_CAPACITY);
}

// The least key of items that may be chosen.
__device__ __forceinline__ uint32_t least_chosen_key(const Threshold& threshold) {
    return threshold.key + (threshold.ties == 0);
}

// Makes results of the first `count` of shared().chosen_columns, and stores them.
__device__ __forceinline__ void store_chosen(const TopkParams& p, int row, const Range& of_row,
                                             const Threshold& threshold, int count) {
    const Results results = results_of(p, row, of_row);
    results.store(p, threshold.num_chosen(threshold.before), count, [&](int i) { return shared().chosen_columns[i]; });
}

// Chooses from a part without a pool. Not inlined, as it is rare.
__device__ __noinline__ void choose_from_memory(const TopkParams& p, int row, Range of_row, Range range) {
    const RowInMemory items = {p, row, range};
    const Threshold threshold = find_threshold(items, p.k);
    end_reading_of_others();
    wait_for_readers();
    const uint32_t least = least_chosen_key(threshold);
    const int count = collect_by_column(range, threshold, [&](int begin, int end) {
        items.for_columns(begin, end, [&](uint32_t key, int column) {
            mark_if(key >= least, key == threshold.key, column - begin);
        });
    });
    store_chosen(p, row, of_row, threshold, count);
}

// Stores the columns of a pool's chosen items to shared().chosen_columns, ascending. Returns how many they are.
__device__ __forceinline__ int collect_pool_by_marks(const Items& items, const Range& range,
                                                     const Threshold& threshold) {
    const uint32_t least = least_chosen_key(threshold);
    return collect_by_column(range, threshold, [&](int begin, int end) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (v >= items.vectors) break;
            const uint4 four = *reinterpret_cast<const uint4*>(&shared().pool_columns[Items::first_in_pool(v)]);
            const uint32_t columns[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t key = items.key[v][i], column = columns[i] - begin;
                mark_if(key >= least && column < uint32_t(end - begin), key == threshold.key, column);
            }
        }
    });
}

// Chooses from a part that registers do not hold. The logits of the pool's first step are under way together with
// those of the sample.
__device__ __forceinline__ void choose_streamed(const TopkParams& p, int row, const Range& of_row,
                                                const Range& range) {
    Sample sample;
    sample.load(p, row, of_row);
    Step step;
    step.load(p, row * p.logits_stride, range, range.begin / 4 * 4);
    __syncthreads();  // bins are 0
    const int num_pooled = fill_pool(p, row, range, guess_cutoff(p, of_row, sample), step);
    if (pools_suffice(num_pooled, p.k)) {
        Items items;
        items.set_pooled(num_pooled);
        const Threshold threshold = find_threshold(items, p.k);
        end_reading_of_others();
        wait_for_readers();
#if ORDERED
        const bool positions = p.table.blocks == nullptr;
        const int count = collect_pool_by_column(items, range, threshold, positions ? of_row.begin : 0);
        if (positions) {
            results_of(p, row, of_row).copy(0, count);
        } else {
            store_chosen(p, row, of_row, threshold, count);
        }
#else
        store_chosen(p, row, of_row, threshold, collect_pool_by_marks(items, range, threshold));
#endif
    } else {
        choose_from_memory(p, row, of_row, range);
    }
}
