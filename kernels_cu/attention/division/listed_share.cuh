// Shares of lists without lengths, which end where -1 begins: that is looked for before the work is divided.
//
// A plan (share.cuh) has all lists divided, evenly or not: where a list has lengths (ALIKE) and ends before a place
// where the plan cuts it, a split has no tiles.
#pragma once
#include "attention/division/find_share.cuh"

// What a look at two entries of each main list, or at its length, tells: all are full, or none goes beyond FEW_PAIRS.
enum class Look { FULL, FEW, OTHER };
constexpr int FEW_PAIRS = 2;
template <int THREADS>
__device__ __forceinline__ Look look_at_lists(const AttentionParams& p) {
    const int behind = min(FEW_PAIRS * 2 * TILE_ROWS, p.main.topk - 1);
    bool full = true, few = true;
#pragma unroll 1
    for (int index = threadIdx.x; index < p.num_queries; index += THREADS) {
        const Query query = query_by_branch(p, index);
        if (has_lengths(p)) {
            full &= list_length(p.main, query.b) == p.main.topk;
            few &= pairs_of(p, index) <= FEW_PAIRS;
        } else {
            const int32_t* list = list_of(p.main, query);
            const int32_t last = list[p.main.topk - 1], entry = list[behind];
            full &= last >= 0;
            few &= entry < 0;
        }
    }
    if (__syncthreads_and(full)) return Look::FULL;
    return __syncthreads_and(few) ? Look::FEW : Look::OTHER;
}

// The pairs of tiles of a query's main list whose entries stand in front, behind them -1: up to the last pair that
// begins with an entry, at least 1. Where -1 stands elsewhere, too, it is some number of pairs that the list has.
__device__ __forceinline__ int listed_pairs(const AttentionParams& p, int query) {
    constexpr int PROBES = 4;  // entries that are asked for at a time
    const int32_t* list = list_of(p.main, query_by_branch(p, query));
    int low = 0, high = ceil_div(p.main.topk, 2 * TILE_ROWS);  // pair `low` begins with an entry, `high` does not
#pragma unroll 1
    while (high - low > 1) {
        const int begin = low, size = high - low;
        int32_t entries[PROBES];
        auto pair_of = [&](int i) { return begin + min(ceil_div(size * (i + 1), PROBES + 1), size - 1); };
#pragma unroll
        for (int i = 0; i < PROBES; ++i) entries[i] = list[pair_of(i) * 2 * TILE_ROWS];
#pragma unroll
        for (int i = PROBES - 1; i >= 0; --i) {
            if (entries[i] < 0) high = pair_of(i);
        }
#pragma unroll
        for (int i = 0; i < PROBES; ++i) {
            if (pair_of(i) < high) low = pair_of(i);
        }
    }
    return low + 1;
}

// As find_share; main lists without lengths count up to where -1 begins, as they are divided. What is worked on are
// lists to their ends. `listed` is shared memory for a number for each query. There is one search for both: a second
// copy of its code costs launches that never run it.
constexpr int MOST_LISTED = 4096;
template <int THREADS>
__device__ __forceinline__ void find_listed_share(const AttentionParams& p, int share, Share<THREADS>& found,
                                                  uint16_t* listed) {
    const bool lengths = has_lengths(p);
    if (p.num_splits > 1) {
        if (lengths) find_split_share(p, share, found);
        return;
    }
    if (!lengths && (p.extra.topk > 0 || p.num_queries > MOST_LISTED || p.main.topk <= 2 * TILE_ROWS)) return;
    const Look look = divided_alike(p) ? look_at_lists<THREADS>(p) : Look::OTHER;
    if (look == Look::FULL) return;
    if (look == Look::FEW) {
        find_whole_share(p, share, found);
        return;
    }
    if (!lengths) {
#pragma unroll 1
        for (int query = threadIdx.x; query < p.num_queries; query += THREADS) listed[query] = listed_pairs(p, query);
        __syncthreads();
    }
    find_uneven_share(p, share, found, [&](int query) { return lengths ? pairs_of(p, query) : int(listed[query]); });
}

// As find_listed_share, or loads what an earlier launch has found. All threads call.
template <int THREADS>
__device__ __forceinline__ void find_planned_share(const AttentionParams& p, int share, Share<THREADS>& found,
                                                   uint16_t* listed) {
    if (p.plan_filled > 0) {
        load_share(p, share, found);
        __syncthreads();
    } else {
        find_listed_share(p, share, found, listed);
        leave_share(p.plan, share, found);
    }
}
