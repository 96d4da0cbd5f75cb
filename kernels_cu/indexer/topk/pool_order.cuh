// ORDERED: brings the chosen items of a pool into the order of their columns.
//
//   pool      | chunk 3 | chunk 0 | chunk 2 | ...    a chunk stands where its warp found room
//   columns   | chunk 0 | chunk 1 | chunk 2 | ...
//
// Some items of the pool are marked. An item's rank by columns is the number of marked items before it in its chunk,
// and in all chunks of lower columns. Its rank in the pool, the number of marked items before it there, is known from
// a sum over the pool. Both differ by the same number for all items of a chunk, the chunk's shift:
//
//   shift of a chunk = marked items in chunks of lower columns - marked items before the chunk in the pool
//
// Ties: a first turn marks the items equal to the threshold, and those of ranks below `ties` are chosen. The second
// turn marks all chosen items, and their ranks are their places.
#pragma once
#include "indexer/topk/pool.cuh"
#include "indexer/topk/threshold.cuh"

#if ORDERED
// How many marked items come before place `at` in the pool.
__device__ __forceinline__ int rank_in_pool(int at) {
    const uint32_t four = shared().ranks[at / 4];
    return (four >> 4) + __popc(four & ((1u << at % 4) - 1));
}

// The marked items of the pool that this thread has in registers (Items::set_pooled).
struct Marked {
    uint32_t mask;  // bit 4 v + i: item i of vector v
    int before[4];  // marked items before each vector in the pool
    int total;      // in the pool

    // Finds the ranks in the pool, and the chunks' shifts. `range` is what the pool was filled from. Called by the
    // CTA.
    __device__ __forceinline__ Marked(uint32_t mask, const Range& range) : mask(mask) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        uint32_t counts = 0;  // a byte a vector
#pragma unroll
        for (int v = 0; v < 4; ++v) counts |= __popc(mask >> 4 * v & 15) << 8 * v;
        const uint32_t sums = inclusive_sum(counts, lane), mine = sums - counts;
        if (lane == 31) shared().warp_sums[warp] = sums;
        __syncthreads();
        const uint32_t of_lane = lane < WARPS ? shared().warp_sums[lane] : 0;
        // Sums over warps need 16 bits: vectors 0 and 2 in one word, 1 and 3 in another.
        const uint32_t even = of_lane & 0x00ff00ff, odd = of_lane >> 8 & 0x00ff00ff;
        const uint32_t all_even = __reduce_add_sync(~0u, even), all_odd = __reduce_add_sync(~0u, odd);
        const uint32_t before_even = __reduce_add_sync(~0u, lane < warp ? even : 0);
        const uint32_t before_odd = __reduce_add_sync(~0u, lane < warp ? odd : 0);
        total = 0;
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            const int shift = v / 2 * 16;
            before[v] = total + ((v % 2 ? before_odd : before_even) >> shift & 0xffff) + (mine >> 8 * v & 255);
            total += (v % 2 ? all_odd : all_even) >> shift & 0xffff;
            if (v * THREADS * 4 < POOL_CAPACITY) {
                shared().ranks[v * THREADS + threadIdx.x] = before[v] << 4 | (mask >> 4 * v & 15);
            }
        }
        if (threadIdx.x == 0) shared().ranks[POOL_CAPACITY / 4] = total << 4;
        __syncthreads();
        // Each thread has `each` neighbouring chunks.
        const int chunks = ceil_div(range.end - range.begin / 4 * 4, Step::SIZE) * WARPS;
        const int each = ceil_div(chunks, THREADS), first = min(int(threadIdx.x) * each, chunks);
        const int last = min(first + each, chunks);
        int of_thread = 0;
#pragma unroll 1
        for (int i = first; i < last; ++i) of_thread += marked_in_chunk(i);
        const int sum = inclusive_sum(of_thread, lane);
        if (lane == 31) shared().warp_sums[warp] = sum;
        __syncthreads();
        int by_columns = __reduce_add_sync(~0u, lane < warp ? shared().warp_sums[lane] : 0) + sum - of_thread;
#pragma unroll 1
        for (int i = first; i < last; ++i) {
            shared().chunk_shifts[i] = by_columns - rank_in_pool(shared().chunks_in_pool[i] >> 16);
            by_columns += marked_in_chunk(i);
        }
        __syncthreads();
    }

    // How many items of a chunk are marked.
    static __device__ __forceinline__ int marked_in_chunk(int chunk) {
        const uint32_t in_pool = shared().chunks_in_pool[chunk], start = in_pool >> 16;
        return rank_in_pool(start + (in_pool & 0xffff)) - rank_in_pool(start);
    }

    // Calls act(rank by columns, column, bit in the mask) for each marked item of this thread.
    template <typename Act>
    __device__ __forceinline__ void for_each(int vectors, const Range& range, Act act) const {
        const int base = range.begin / 4 * 4;
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            if (v >= vectors) break;
            const uint4 four = *reinterpret_cast<const uint4*>(&shared().pool_columns[Items::first_in_pool(v)]);
            const uint32_t columns[4] = {four.x, four.y, four.z, four.w};
            int rank = before[v];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (mask >> (4 * v + i) & 1) {
                    const int column = columns[i];
                    act(shared().chunk_shifts[(column - base) / CHUNK] + rank++, column, 4 * v + i);
                }
            }
        }
    }
};

// Stores column - `start` of each chosen item to shared().chosen_columns, ascending. Returns how many they are. Called
// by the CTA, when its histograms are no longer needed.
__device__ __forceinline__ int collect_pool_by_column(const Items& items, const Range& range,
                                                      const Threshold& threshold, int start) {
    uint32_t chosen = items.mask_of([&](uint32_t key) { return key > threshold.key; }), equal = 0;
    if (threshold.ties > 0) equal = items.mask_of([&](uint32_t key) { return key == threshold.key; });
    int total = 0;
#pragma unroll 1
    for (bool of_equal = threshold.ties > 0, again = true; again; of_equal = false) {
        const Marked marked(of_equal ? equal : chosen, range);
        marked.for_each(items.vectors, range, [&](int rank, int column, int bit) {
            if (of_equal) {
                if (rank < threshold.ties) chosen |= 1u << bit;
            } else {
                shared().chosen_columns[rank] = column - start;
            }
        });
        total = marked.total;
        again = of_equal;
    }
    __syncthreads();
    return total;
}
#endif
