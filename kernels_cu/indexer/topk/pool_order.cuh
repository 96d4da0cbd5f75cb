// The chosen of a pool in the order of their columns, where the pool has a chunk's items side by side (ORDERED).
//
//   pool      | chunk 3 | chunk 0 | chunk 2 | ...    a chunk is where its warp found room
//   columns   | chunk 0 | chunk 1 | chunk 2 | ...
//
// The place of a chosen item is the number of chosen ones before it in its chunk, and in all chunks of lower columns. A
// sum over the pool gives the one, a sum over the chunks the other.
#pragma once
#include "indexer/topk/pool.cuh"
#include "indexer/topk/threshold.cuh"

#if ORDERED
// How many of the pool's marked items are before its place `at`.
__device__ __forceinline__ int rank_in_pool(int at) {
    const uint32_t four = shared().ranks[at / 4];
    return (four >> 4) + __popc(four & ((1u << at % 4) - 1));
}

// Marked items of the pool, and how many are before them: in their chunk by columns, and in all of the pool.
struct Marked {
    uint32_t mask;  // bit 4 v + i: item i of vector v
    int before[4];  // of vectors: how many are before in the pool
    int total;      // of the CTA

    // `range` is what the pool was filled from. Called by the CTA.
    __device__ __forceinline__ Marked(uint32_t mask, const Range& range) : mask(mask) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        uint32_t counts = 0;  // a byte a vector
#pragma unroll
        for (int v = 0; v < 4; ++v) counts |= __popc(mask >> 4 * v & 15) << 8 * v;
        const uint32_t sums = inclusive_sum(counts, lane), mine = sums - counts;
        if (lane == 31) shared().of_warp[warp] = sums;
        __syncthreads();
        const uint32_t of_lane = lane < WARPS ? shared().of_warp[lane] : 0;
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
            if (v * THREADS * 4 < CAPACITY) {
                shared().ranks[v * THREADS + threadIdx.x] = before[v] << 4 | (mask >> 4 * v & 15);
            }
        }
        if (threadIdx.x == 0) shared().ranks[CAPACITY / 4] = total << 4;
        __syncthreads();
        const int chunks = ceil_div(range.end - range.begin / 4 * 4, Step::SIZE) * WARPS;
        const int each = ceil_div(chunks, THREADS), first = min(int(threadIdx.x) * each, chunks);
        const int last = min(first + each, chunks);
        int of_thread = 0;
#pragma unroll 1
        for (int i = first; i < last; ++i) of_thread += of_chunk(i);
        const int sum = inclusive_sum(of_thread, lane);
        if (lane == 31) shared().of_warp[warp] = sum;
        __syncthreads();
        int by_columns = __reduce_add_sync(~0u, lane < warp ? shared().of_warp[lane] : 0) + sum - of_thread;
#pragma unroll 1
        for (int i = first; i < last; ++i) {
            shared().shifts_of_chunks[i] = by_columns - rank_in_pool(shared().chunks[i] >> 16);
            by_columns += of_chunk(i);
        }
        __syncthreads();
    }

    // How many of a chunk's items are marked.
    static __device__ __forceinline__ int of_chunk(int chunk) {
        const uint32_t in_pool = shared().chunks[chunk], start = in_pool >> 16;
        return rank_in_pool(start + (in_pool & 0xffff)) - rank_in_pool(start);
    }

    // Calls act(number by columns, column, bit in the mask) for each marked item of this thread.
    template <typename Act>
    __device__ __forceinline__ void for_each(int vectors, const Range& range, Act act) const {
        const int base = range.begin / 4 * 4;
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            if (v >= vectors) break;
            const uint4 four = *reinterpret_cast<const uint4*>(&shared().columns[Items::first_in_pool(v)]);
            const uint32_t columns[4] = {four.x, four.y, four.z, four.w};
            int rank = before[v];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (mask >> (4 * v + i) & 1) {
                    const int column = columns[i];
                    act(shared().shifts_of_chunks[(column - base) / CHUNK] + rank++, column, 4 * v + i);
                }
            }
        }
    }
};

// Brings the chosen of the pool's items into shared().chosen_columns, ascending, less `start`. Returns how many they
// are. Called by the CTA, when no one needs its histograms any more.
__device__ __forceinline__ int bring_pooled_in_order(const Items& items, const Range& range,
                                                     const Threshold& threshold, int start) {
    uint32_t larger = items.mask_of([&](uint32_t order) { return order > threshold.order; }), equal = 0;
    if (threshold.ties > 0) equal = items.mask_of([&](uint32_t order) { return order == threshold.order; });
    int total = 0;
#pragma unroll 1
    for (bool of_equal = threshold.ties > 0, again = true; again; of_equal = false) {
        const Marked marked(of_equal ? equal : larger, range);
        marked.for_each(items.vectors, range, [&](int number, int column, int bit) {
            if (of_equal) {
                if (number < threshold.ties) larger |= 1u << bit;
            } else {
                shared().chosen_columns[number] = column - start;
            }
        });
        total = marked.total;
        again = of_equal;
    }
    __syncthreads();
    return total;
}
#endif
