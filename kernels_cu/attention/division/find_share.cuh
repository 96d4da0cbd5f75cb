// How a CTA finds its share, that is, where it begins and ends:
//
//   even_boundary       all lists are full      all items cost the same
//   split_boundary      p.num_splits > 1        each item has p.num_splits equal splits
//   find_uneven_share   lists may be shorter    by the cost of each query, summed over the queries before it
//   find_whole_share    lists are short         items stay whole
//
// find_share_early does it where the arguments alone tell; find_share where lengths in memory must be read.
#pragma once
#include "attention/division/share.cuh"
#include "tile/warp.cuh"

// Costs are counted in units; a pair of tiles costs PAIR_COST. An item costs something besides: for its Q, its first
// rows and its results. Where all lists are equally long that is p.item_cost, which was chosen so that the slowest
// share is fastest; else it is the kernel's UNEVEN_ITEM_COST.
constexpr int PAIR_COST = 8;

__device__ __forceinline__ int pairs_of(const AttentionParams& p, int query) {
    Lists w;
    w.query = query_by_branch(p, query);
    return ceil_div(find_lists(p, w), 2);
}

// The pairs of tiles of a query whose lists are full.
__device__ __forceinline__ int most_pairs(const AttentionParams& p) {
    return ceil_div(ceil_div(p.main.topk, TILE_ROWS) + ceil_div(p.extra.topk, TILE_ROWS), 2);
}

__device__ __forceinline__ uint32_t cost_of(int pairs) { return UNEVEN_ITEM_COST + pairs * PAIR_COST; }

// The boundary between pairs that is nearest to cost `at` of an item. No split gets fewer than p.least_split pairs:
// the boundary then moves to the item's begin or end.
__device__ __forceinline__ Boundary nearest_boundary(const AttentionParams& p, int item, int pairs, int at) {
    const int pair = (max(at, 0) + PAIR_COST / 2) / PAIR_COST;
    if (pair < p.least_split) return {item, 0};
    if (pairs - pair < p.least_split) return {item + 1, 0};
    return {item, pair};
}

// Where share `cta` begins, if each item is divided into p.num_splits equal splits.
__device__ __forceinline__ Boundary split_boundary(const AttentionParams& p, uint32_t cta) {
    const int item = cta / p.num_splits, split = cta % p.num_splits;
    return {item, split == 0 ? 0 : pairs_of(p, query_of_item(p, item)) * split / p.num_splits};
}

// Where share `cta` begins, if all lists are full.
__device__ __forceinline__ Boundary even_boundary(const AttentionParams& p, uint32_t cta) {
    const int pairs = most_pairs(p);
    const uint32_t cost = p.item_cost + pairs * PAIR_COST;
    const uint64_t total = uint64_t(p.num_queries * num_head_tiles(p)) * cost, at = total * cta / gridDim.x;
    return nearest_boundary(p, at / cost, pairs, int(at % cost) - p.item_cost);
}

// Finds a share where lists may have different lengths; pairs_at(query) returns the number of a query's pairs of
// tiles. Items stay whole if then no share costs much more than the mean. That saves merges where lengths are often
// equal, as where most contexts are longer than topk. All threads call; each computes the costs of some queries.
template <int THREADS, typename Pairs>
__device__ __forceinline__ void find_uneven_share(const AttentionParams& p, int share, Share<THREADS>& found,
                                                  Pairs pairs_at) {
    const int each = ceil_div(p.num_queries, THREADS), first = threadIdx.x * each;
    const int end = min(first + each, p.num_queries);
    uint32_t cost = 0, most = 0, of_tile;  // this thread's queries: sum, maximum; and the sum over all queries
#pragma unroll 1
    for (int query = first; query < end; ++query) {
        const uint32_t of_query = cost_of(pairs_at(query));
        cost += of_query;
        most = max(most, of_query);
    }
    uint32_t before = cta_sum_before(cost, found.costs, of_tile);
    const uint32_t head_tiles = num_head_tiles(p);
    const bool cut = __syncthreads_or(most * p.whole_items > of_tile * head_tiles + p.cut_cost);
    if (!cut) before = first, cost = max(end - first, 0), of_tile = p.num_queries;  // each item costs 1
    const uint32_t total = of_tile * head_tiles;
#pragma unroll 1
    for (uint32_t i = 0; i < 2; ++i) {
        Boundary& boundary = i == 0 ? found.begin : found.end;
        const uint32_t at = uint64_t(total) * (share + i) / gridDim.x, tile = at / of_tile;
        if (threadIdx.x == 0 && at == total) boundary = {int(p.num_queries * head_tiles), 0};
        uint32_t left = at % of_tile;
        if (at == total || left < before || left >= before + cost) continue;
        left -= before;
#pragma unroll 1
        for (int query = first; query < end; ++query) {
            const int pairs = pairs_at(query);
            const uint32_t of_query = cut ? cost_of(pairs) : 1;
            if (left < of_query) {
                boundary = nearest_boundary(p, tile * p.num_queries + query, pairs, int(left) - UNEVEN_ITEM_COST);
                break;
            }
            left -= of_query;
        }
    }
    __syncthreads();
}

// Whether a share is first found as if all lists were full, which needs no lengths from memory.
__device__ __forceinline__ bool divided_alike(const AttentionParams& p) { return !has_lengths(p) || p.flags & ALIKE; }

// Finds such a share. All threads must meet afterwards.
template <int THREADS>
__device__ __forceinline__ void find_share_early(const AttentionParams& p, int share, Share<THREADS>& found) {
    if (!divided_alike(p) || threadIdx.x >= 2) return;
    const uint32_t n = share + threadIdx.x;
    (threadIdx.x == 0 ? found.begin : found.end) = p.num_splits > 1 ? split_boundary(p, n) : even_boundary(p, n);
}

// Finds a share where each item is divided into p.num_splits equal splits. All threads call.
template <int THREADS>
__device__ __forceinline__ void find_split_share(const AttentionParams& p, int share, Share<THREADS>& found) {
    set_boundaries(found, share, [&](uint32_t n) { return split_boundary(p, n); });
    __syncthreads();
}

// Finds a share of whole items. All threads call.
template <int THREADS>
__device__ __forceinline__ void find_whole_share(const AttentionParams& p, int share, Share<THREADS>& found) {
    const uint32_t items = p.num_queries * num_head_tiles(p);
    set_boundaries(found, share, [&](uint32_t n) { return Boundary{int(items * n / gridDim.x), 0}; });
    __syncthreads();
}

// Finds a share of lists with lengths. All threads call.
template <int THREADS>
__device__ __forceinline__ void find_share(const AttentionParams& p, int share, Share<THREADS>& found) {
    if (!has_lengths(p)) return;
    if (p.num_splits == 1) {
        find_uneven_share(p, share, found, [&](int query) { return pairs_of(p, query); });
    } else {
        find_split_share(p, share, found);
    }
}
