// topk's constants and shared memory, and the CTAs that work on a row together.
#pragma once
#include "indexer/topk/params.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int VECTORS = ITEMS / 4;     // of four items, of a thread
constexpr int TILE = THREADS * ITEMS;  // items that the CTA's registers hold
constexpr int MAX_CLUSTER = 8;

// Radix search.
constexpr int BINS = 2048;
constexpr int SEARCHERS = THREADS >= 1024 ? 1024 : THREADS >= 512 ? 512 : 256;  // threads that search bins
constexpr int BINS_PER_THREAD = BINS / SEARCHERS;
using Histogram = uint32_t[BINS + 4];  // word BINS takes the counts of items that are in no bin; nothing reads it
constexpr uint32_t OUTSIDE = 0;        // the key of what is outside of the range

// Long rows.
constexpr int SAMPLE_VECTORS = 2;  // of a thread
constexpr int POOL_CAPACITY = !STREAMED ? 4 : TILE < 8192 ? TILE : 8192;
constexpr int MARK_WINDOW = POOL_CAPACITY / 2 * 32;  // columns that the two bitmaps have room for at a time
constexpr uint32_t MAX_K = STREAMED ? POOL_CAPACITY / 2 : 4096;

constexpr int32_t NO_SLOT = int32_t(0x80000000);  // a slot shift that makes every position negative

#if ORDERED
constexpr int CHUNK = 512;  // neighbouring columns: those that a warp reads in a step through the row
// As many as a range may have, and a few more: cupy_mla/cuda/topk.py bounds the ranges (MOST_ORDERED).
constexpr int CHUNKS = THREADS >= 512 ? 2112 : 512;
constexpr int MAX_LISTED = 32;  // a lane each
#endif

static_assert(THREADS >= 256 && ITEMS % 4 == 0 && ITEMS <= 32, "a mask of a thread's items has 32 bits");
static_assert(!STREAMED || POOL_CAPACITY % (2 * THREADS) == 0, "all threads have as many words of a bitmap");
static_assert(!ORDERED || (STREAMED && !CLUSTERS && VECTORS == 4), "counts of four vectors, a byte each");
static_assert(!CLUSTERS || (BINS_PER_THREAD == 2 && WARPS == 32), "a lane a warp's sum, 8 bytes a lane of its bins");

struct Shared {
    union {
        // One for all three digits; all 0 between searches. In a cluster one a digit, since other CTAs may still read
        // that of the digit before.
        Histogram bins[CLUSTERS ? 3 : 1];
        // Once histograms are no longer needed: the columns of chosen items, ascending. Where registers held the row,
        // mostly its results already.
        int32_t chosen_columns[MAX_K];
    };
    union {
        uint32_t pool_logits[POOL_CAPACITY];  // bits of float32, in the order in which warps found room
        // Once the pool is in registers: a bit a column, [0] for items larger than the threshold, [1] for equal ones.
        uint32_t marks[2][POOL_CAPACITY / 2];
#if ORDERED
        struct {
            // A word for four items of the pool: how many marked items come before them << 4 | the four's own marks.
            uint32_t ranks[POOL_CAPACITY / 4 + 1];
            int32_t chunk_shifts[CHUNKS];  // rank of an item by columns = its rank in the pool + its chunk's shift
        };
#endif
    };
    uint32_t pool_columns[POOL_CAPACITY];
    // CLUSTERS, for each digit: items in the bins that a warp searches. The second word pads to 8 bytes.
    uint32_t warp_bin_sums[3][WARPS][2];
    uint32_t warp_sums[WARPS];
#if ORDERED
    union {
        int32_t slot_shifts[THREADS];     // of blocks of the table (results.cuh)
        uint32_t chunks_in_pool[CHUNKS];  // where a chunk's items begin in the pool << 16 | how many they are
    };
    uint32_t listed_keys[MAX_LISTED], num_listed;  // the keys of a bin of few items
#else
    int32_t slot_shifts[THREADS];  // of blocks of the table (results.cuh)
#endif
    // What a search of the bins found: the bin, the items in bins above it, and in it. CLUSTERS: as many of these as
    // are in the row's CTAs before this one.
    int32_t digit, above, inside, above_before, inside_before;
    uint32_t num_pooled;  // items that are in the pool, or would be if it had room
};
extern __shared__ uint4 shared_bytes[];
__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(shared_bytes); }

// The CTAs that work on a row together, and this CTA's number among them.
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
// Until the row's other CTAs read nothing more from the shared memory of this CTA: it may be overwritten.
__device__ __forceinline__ void wait_for_readers() {
    if constexpr (CLUSTERS) cluster_wait();
}
