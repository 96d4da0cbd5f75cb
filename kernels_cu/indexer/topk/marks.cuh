// The chosen of a long row in the order of their columns, by a bit of shared memory a column: WINDOW columns at a time
// are marked, in any order, and counted.
#pragma once
#include "indexer/topk/threshold.cuh"

// Marks a column of a window, if it is to be, as larger than the threshold or equal to it. Without a branch.
__device__ __forceinline__ void mark_if(bool when, bool equal, uint32_t column) {
    atomicOr(&shared().marks[equal][column % WINDOW / 32], when ? 1u << column % 32 : 0);
}

// How much is marked in some words: in the lower 14 bits larger ones, in the others equal ones.
__device__ __forceinline__ uint32_t count_marks(uint32_t larger, uint32_t equal) {
    return __popc(larger) | __popc(equal) << 14;
}

__device__ __forceinline__ uint32_t first_bits(uint32_t bits, int count) {
    uint32_t first = 0;
    for (int i = 0; i < count && bits != 0; ++i, bits &= bits - 1) first |= bits & (0u - bits);
    return first;
}

// Brings the columns of a range's chosen items into shared().chosen_columns, ascending. Returns how many they are.
// `mark_window(begin, end)` marks those of these columns that the threshold does not rule out. Called by the CTA, when
// no one needs its histograms any more.
template <typename MarkWindow>
__device__ __forceinline__ int bring_in_order(const Range& range, const Threshold& threshold, MarkWindow mark_window) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ties = threshold.ties;
    const bool with_equal = ties > 0;
    const auto& marks = shared().marks;
    const int ties_before = min(threshold.before.equal(), ties);
    int larger = 0, equal = threshold.before.equal();  // in the windows before; in the CTAs before too
    for (int begin = range.begin / 4 * 4; begin < range.end; begin += WINDOW) {
        const int end = min(range.end - begin, WINDOW) + begin;
        const int words = ceil_div(end - begin, 32 * THREADS);  // a thread
        __syncthreads();                                        // what was there has been read
        for (int i = threadIdx.x; i < words * THREADS; i += THREADS) {
            shared().marks[0][i] = 0;
            if (with_equal) shared().marks[1][i] = 0;
        }
        __syncthreads();
        mark_window(begin, end);
        __syncthreads();
        const int first = threadIdx.x * words;
        uint32_t mine = 0;
        for (int i = first; i < first + words; ++i) mine += count_marks(marks[0][i], with_equal ? marks[1][i] : 0);
        const uint32_t sum = inclusive_sum(mine, lane);
        if (lane == 31) shared().of_warp[warp] = sum;
        __syncthreads();
        const uint32_t of_lane = lane < WARPS ? shared().of_warp[lane] : 0;
        const uint32_t before = __reduce_add_sync(~0u, lane < warp ? of_lane : 0) + sum - mine;
        const uint32_t all = __reduce_add_sync(~0u, of_lane);
        int equal_before = equal + int(before >> 14);
        int place = larger + int(before & 0x3fff) + min(equal_before, ties) - ties_before;
        for (int i = first; i < first + words; ++i) {
            uint32_t bits = marks[0][i];
            if (with_equal) {
                bits |= first_bits(marks[1][i], ties - equal_before);
                equal_before += __popc(marks[1][i]);
            }
            for (; bits != 0; bits &= bits - 1) {
                shared().chosen_columns[place++] = begin + 32 * i + __popc((bits & (0u - bits)) - 1);
            }
        }
        larger += all & 0x3fff;
        equal += all >> 14;
    }
    __syncthreads();
    return larger + min(equal, ties) - ties_before;
}
