// Selection of the largest logits: its constants and its shared memory.
#pragma once
#include "indexer/topk/params.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int VECTORS = ITEMS / 4, TILE = THREADS * ITEMS;  // items
constexpr int BINS = 2048;
constexpr int SEARCHERS = THREADS >= 1024 ? 1024 : THREADS >= 512 ? 512 : 256;  // threads that have bins
constexpr int BINS_OF_THREAD = BINS / SEARCHERS;
using Histogram = uint32_t[BINS + 4];  // word BINS counts what is in no bin; nothing reads it
constexpr int CAPACITY = !STREAMED ? 4 : TILE < 8192 ? TILE : 8192;  // of the pool
constexpr int WINDOW = CAPACITY / 2 * 32;  // columns whose choice is marked in shared memory at a time
constexpr int SAMPLED = 2;                 // vectors of a thread in the sample
constexpr uint32_t MAX_K = STREAMED ? CAPACITY / 2 : 4096;
constexpr int MAX_CLUSTER = 8;
constexpr uint32_t OUTSIDE = 0;
constexpr int32_t NO_SLOT = int32_t(0x80000000);  // a shift that makes every position negative
#if ORDERED
constexpr int CHUNK = 512;  // columns of a warp in a step through a row
// Of a row, at most: more than cupy_mla/cuda/topk.py lets it have.
constexpr int CHUNKS = THREADS >= 512 ? 2112 : 512;
constexpr int MOST_LISTED = 32;
#endif
static_assert(THREADS >= 256 && ITEMS % 4 == 0 && ITEMS <= 32, "");
static_assert(!STREAMED || CAPACITY % (2 * THREADS) == 0, "a thread has as many words of marks");
static_assert(!ORDERED || (STREAMED && !CLUSTERS && VECTORS == 4), "a byte a vector");
static_assert(!CLUSTERS || (BINS_OF_THREAD == 2 && WARPS == 32), "a lane a warp's sum, 8 bytes a lane of its bins");

struct Shared {
    union {
        Histogram bins[CLUSTERS ? 3 : 1];  // those of [0] are all 0 between uses
        // When histograms are no longer needed: those of chosen items, ascending; of short rows also their results.
        int32_t chosen_columns[MAX_K];
    };
    union {
        uint32_t pool[CAPACITY];  // logits that may be chosen, in any order
        // When those are in registers: a bit a column, if larger than the threshold, if equal.
        uint32_t marks[2][CAPACITY / 2];
#if ORDERED
        struct {
            uint32_t ranks[CAPACITY / 4 + 1];  // of four items: marked ones before them; the four's marks
            int32_t shifts_of_chunks[CHUNKS];  // what added to a rank in the pool makes it one by columns
        };
#endif
    };
    uint32_t columns[CAPACITY];    // of the pool
    uint32_t groups[3][WARPS][2];  // of a cluster, each pass: items in a warp's bins; the other word is not used
    uint32_t of_warp[WARPS];
#if ORDERED
    union {
        int32_t shifts[THREADS];  // of blocks of the table
        uint32_t chunks[CHUNKS];  // where a chunk's items are in the pool; in the lower 16 bits, how many
    };
    uint32_t list[MOST_LISTED], listed;  // the last orders that the k-th largest is one of
#else
    int32_t shifts[THREADS];  // of blocks of the table
#endif
    int32_t digit, above, inside, above_before, inside_before;
    uint32_t pooled;
};
extern __shared__ uint4 shared_bytes[];
__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(shared_bytes); }

// The CTAs that work on a row together, and this CTA among them.
__device__ __forceinline__ int num_parts() {
    if constexpr (CLUSTERS) return cluster_size();
    return 1;
}
__device__ __forceinline__ int this_part() {
    if constexpr (CLUSTERS) return cluster_rank();
    return 0;
}

// This CTA reads nothing more from the shared memory of the row's other CTAs.
__device__ __forceinline__ void end_reading_of_others() {
    if constexpr (CLUSTERS) cluster_arrive();
}
// The row's other CTAs have read what they need of this one's: it may end.
__device__ __forceinline__ void wait_for_readers() {
    if constexpr (CLUSTERS) cluster_wait();
}
