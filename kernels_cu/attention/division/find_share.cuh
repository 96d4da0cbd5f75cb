// How a CTA finds its share: where the shares' boundaries are.
//
//   even_boundary       all lists are full         an item costs the same as any other
//   split_boundary      p.num_splits > 1           an item has as many equal splits
//   find_uneven_share   lists may not be full      by the sum of the costs of the queries before
//   find_whole_share                               items stay whole
//
// find_share_early finds what follows from the arguments alone, find_share what lengths in memory say.
#pragma once
#include "attention/division/share.cuh"
#include "tile/warp.cuh"

// What a pair of tiles costs. Beside them an item costs, for Q, first rows and results, p.item_cost where all lists are
// equally long, with which the slowest share takes the least time, otherwise the kernel's UNEVEN_ITEM_COST.
constexpr int PAIR_COST = 8;

__device__ __forceinline__ int pairs_of(const AttentionParams& p, int query) {
    Lists w;
    w.query = query_by_branch(p, query);
    return ceil_div(find_lists(p, w), 2);
}

// The same where a query has all entries of its lists.
__device__ __forceinline__ int most_pairs(const AttentionParams& p) {
    return ceil_div(ceil_div(p.main.topk, TILE_ROWS) + ceil_div(p.extra.topk, TILE_ROWS), 2);
}

__device__ __forceinline__ uint32_t cost_of(int pairs) { return UNEVEN_ITEM_COST + pairs * PAIR_COST; }

// The boundary nearest to cost `at` of an item's pairs. Splits have p.least_split pairs or more.
__device__ __forceinline__ Boundary nearest_boundary(const AttentionParams& p, int item, int pairs, int at) {
    const int pair = (max(at, 0) + PAIR_COST / 2) / PAIR_COST;
    if (pair < p.least_split) return {item, 0};
    if (pairs - pair < p.least_split) return {item + 1, 0};
    return {item, pair};
}

// Where share `cta` begins, if each item is to be divided into p.num_splits alike.
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

// Finds a share where lists may not be equally long: pairs_at(query) says how many pairs of tiles a query has. Items
// stay whole where no share can then cost much more than the mean: lengths are often equal, as those of contexts longer
// than topk. All threads call; each looks at some of the queries.
template <int THREADS, typename Pairs>
__device__ __forceinline__ void find_uneven_share(const AttentionParams& p, int share, Share<THREADS>& found,
                                                  Pairs pairs_at) {
    const int each = ceil_div(p.num_queries, THREADS), first = threadIdx.x * each;
    const int end = min(first + each, p.num_queries);
    uint32_t cost = 0, most = 0, of_tile;  // of these queries, and of one of them; of all, for a tile of heads
#pragma unroll 1
    for (int query = first; query < end; ++query) {
        const uint32_t of_query = cost_of(pairs_at(query));
        cost += of_query;
        most = max(most, of_query);
    }
    uint32_t before = cta_sum_before(cost, found.costs, of_tile);
    const uint32_t head_tiles = num_head_tiles(p);
    const bool cut = __syncthreads_or(most * p.whole_items > of_tile * head_tiles + p.cut_cost);
    if (!cut) before = first, cost = max(end - first, 0), of_tile = p.num_queries;  // all items cost 1
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

// Whether nothing in memory says how lists are divided, if they are full.
__device__ __forceinline__ bool divided_alike(const AttentionParams& p) { return !has_lengths(p) || p.flags & ALIKE; }

// Finds a share of such lists. The CTA must meet afterwards.
template <int THREADS>
__device__ __forceinline__ void find_share_early(const AttentionParams& p, int share, Share<THREADS>& found) {
    if (!divided_alike(p) || threadIdx.x >= 2) return;
    const uint32_t n = share + threadIdx.x;
    (threadIdx.x == 0 ? found.begin : found.end) = p.num_splits > 1 ? split_boundary(p, n) : even_boundary(p, n);
}

// Finds a share if each item is to be divided into p.num_splits alike. All threads call.
template <int THREADS>
__device__ __forceinline__ void find_split_share(const AttentionParams& p, int share, Share<THREADS>& found) {
    if (threadIdx.x < 2) (threadIdx.x == 0 ? found.begin : found.end) = split_boundary(p, share + threadIdx.x);
    __syncthreads();
}

// Finds a share of whole items. All threads call.
template <int THREADS>
__device__ __forceinline__ void find_whole_share(const AttentionParams& p, int share, Share<THREADS>& found) {
    const uint32_t items = p.num_queries * num_head_tiles(p);
    auto boundary = [&](uint32_t n) { return Boundary{int(items * n / gridDim.x), 0}; };
    if (threadIdx.x < 2) (threadIdx.x == 0 ? found.begin : found.end) = boundary(share + threadIdx.x);
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
