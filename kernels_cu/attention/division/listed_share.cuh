// Shares where lists have no lengths, but may end with -1. How many entries each list really has is found before the
// work is divided.
//
// A plan (share.cuh) may divide lists differently from their lengths (ALIKE): where a list ends before a boundary of
// the plan, a split of it has no tiles.
#pragma once
#include "attention/division/find_share.cuh"

// What two entries of each main list tell, or its length: all are full, or none has more than FEW_PAIRS pairs.
enum class ListsHint { FULL, FEW, OTHER };
constexpr int FEW_PAIRS = 2;
template <int THREADS>
__device__ __forceinline__ ListsHint probe_lists(const AttentionParams& p) {
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
    if (__syncthreads_and(full)) return ListsHint::FULL;
    return __syncthreads_and(few) ? ListsHint::FEW : ListsHint::OTHER;
}

// The number of pairs of tiles in a query's main list before its trailing -1, at least 1. It is found by bisection, on
// the first entry of each pair. If -1 stands between valid entries, the result is too small or too large, but at most
// the number of the list's pairs.
__device__ __forceinline__ int find_listed_pairs(const AttentionParams& p, int query) {
    constexpr int PROBES = 4;  // entries loaded at a time
    const int32_t* list = list_of(p.main, query_by_branch(p, query));
    int low = 0, high = ceil_div(p.main.topk, 2 * TILE_ROWS);  // pair `low` begins with a valid entry, `high` does not
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

// As find_share, but main lists without lengths count up to their trailing -1. This decides only how lists are
// divided: CTAs work on their tiles to the ends. `listed` is shared memory for a number for each query. One call of
// find_uneven_share serves both cases: a second copy of its code slows launches that never run it.
constexpr int MAX_PLANNED_QUERIES = 4096;
template <int THREADS>
__device__ __forceinline__ void find_listed_share(const AttentionParams& p, int share, Share<THREADS>& found,
                                                  uint16_t* listed) {
    const bool lengths = has_lengths(p);
    if (p.num_splits > 1) {
        if (lengths) find_split_share(p, share, found);
        return;
    }
    if (!lengths && (p.extra.topk > 0 || p.num_queries > MAX_PLANNED_QUERIES || p.main.topk <= 2 * TILE_ROWS)) return;
    const ListsHint hint = divided_alike(p) ? probe_lists<THREADS>(p) : ListsHint::OTHER;
    if (hint == ListsHint::FULL) return;
    if (hint == ListsHint::FEW) {
        find_whole_share(p, share, found);
        return;
    }
    if (!lengths) {
#pragma unroll 1
        for (int query = threadIdx.x; query < p.num_queries; query += THREADS)
            listed[query] = find_listed_pairs(p, query);
        __syncthreads();
    }
    find_uneven_share(p, share, found, [&](int query) { return lengths ? pairs_of(p, query) : int(listed[query]); });
}

// Loads this share from the plan that an earlier launch has filled, or finds it as find_listed_share does. All threads
// call.
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
