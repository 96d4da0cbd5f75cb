// Brings the chosen items of a part into the order of their columns by two bitmaps in shared memory, which have a bit
// a column: one for items larger than the threshold, one for those equal to it.
//
//   window     MARK_WINDOW columns, for which the bitmaps have room. For each window of the part:
//     mark     threads set the bits of their items, in any order
//     count    each thread counts the bits of a few neighbouring words; prefix sums over lanes and warps tell the
//              places
//     collect  each thread stores the columns of its words' bits at these places
#pragma once
#include "indexer/topk/threshold.cuh"

// Marks a column of a window as equal to the threshold, or as larger, if `when` is true. The atomic runs in any case:
// where not all lanes execute one, the compiler lets the warp diverge and meet again.
__device__ __forceinline__ void mark_if(bool when, bool equal, uint32_t column) {
    atomicOr(&shared().marks[equal][column % MARK_WINDOW / 32], when ? 1u << column % 32 : 0);
}

// How many columns two words of the bitmaps mark: larger ones in the lower 14 bits (at most k), equal ones in the
// others.
__device__ __forceinline__ uint32_t count_marks(uint32_t larger, uint32_t equal) {
    return __popc(larger) | __popc(equal) << 14;
}

// The lowest `count` set bits.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t bits, int count) {
    uint32_t first = 0;
    for (int i = 0; i < count && bits != 0; ++i, bits &= bits - 1) first |= bits & (0u - bits);
    return first;
}

// Stores the columns of a part's chosen items to shared().chosen_columns, ascending. Returns how many they are.
// `mark_window(begin, end)` marks the items of columns [begin, end) that are larger than the threshold and, if there
// are ties, those equal to it. Called by the CTA, when its histograms are no longer needed.
template <typename MarkWindow>
__device__ __forceinline__ int collect_by_column(const Range& range, const Threshold& threshold,
                                                 MarkWindow mark_window) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ties = threshold.ties;
    const bool with_equal = ties > 0;
    const auto& marks = shared().marks;
    const int ties_before = min(threshold.before.equal(), ties);  // chosen in the row's CTAs before this one
    int larger = 0;                                               // in the windows before
    int equal = threshold.before.equal();                         // in the row's CTAs and the windows before
    for (int begin = range.begin / 4 * 4; begin < range.end; begin += MARK_WINDOW) {
        const int end = min(range.end - begin, MARK_WINDOW) + begin;
        const int words = ceil_div(end - begin, 32 * THREADS);  // of a thread
        __syncthreads();                                        // all have read the window before
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
        if (lane == 31) shared().warp_sums[warp] = sum;
        __syncthreads();
        const uint32_t of_lane = lane < WARPS ? shared().warp_sums[lane] : 0;
        const uint32_t before = __reduce_add_sync(~0u, lane < warp ? of_lane : 0) + sum - mine;
        const uint32_t all = __reduce_add_sync(~0u, of_lane);
        int equal_before = equal + int(before >> 14);
        int place = larger + int(before & 0x3fff) + min(equal_before, ties) - ties_before;
        for (int i = first; i < first + words; ++i) {
            uint32_t bits = marks[0][i];
            if (with_equal) {
                bits |= lowest_bits(marks[1][i], ties - equal_before);
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
