// A share is a CTA's part of a launch's work, where the work is divided evenly over the CTAs. It may begin and end
// within a work item.
//
//   items   |    item 0    |    item 1    |    item 2    |    item 3    |
//   shares  |    share 0    |    share 1    |    share 2    |    share 3    | ...
//
// Items are numbered head tile by head tile: all queries with their first heads, then all queries with the next heads.
// So the two head tiles of a query are half of the shares apart. They are worked on at the same time, and the query's
// rows come from memory once. CTA n takes share n, or neighbouring CTAs take the head tiles of the same queries
// (share_side_by_side).
//
// Calls with the same schedule, as those of a step's layers, use the same plan: the first launch stores the shares
// that its CTAs find in p.plan, and later launches load them.
#pragma once
#include "attention/division/turn.cuh"

// A place between pairs of tiles: before pair `pair` of item `item`.
struct Boundary {
    int item, pair;
};

// This CTA's share, from `begin` up to `end`.
template <int THREADS>
struct Share {
    // Sums over each warp's queries, while the share is searched. Aligned, because else ptxas loads a neighbouring
    // word with them, which racecheck reports as a race.
    alignas(16) uint32_t costs[THREADS / 32];
    Boundary begin, end;

    __device__ __forceinline__ int last_item() const {
        const Boundary behind = end;
        return behind.pair > 0 ? behind.item : behind.item - 1;
    }
    __device__ __forceinline__ int num_items() const { return last_item() + 1 - begin.item; }
    // Whether the share contains the begin of an item, and its end.
    __device__ __forceinline__ bool begins(int item) const { return item != begin.item || begin.pair == 0; }
    __device__ __forceinline__ bool ends(int item) const { return item != end.item; }
};

// Sets where a share begins and ends; boundary_of(n) is where share n begins. All threads must meet afterwards.
template <int THREADS, typename BoundaryOf>
__device__ __forceinline__ void set_boundaries(Share<THREADS>& found, int share, BoundaryOf boundary_of) {
    if (threadIdx.x < 2) (threadIdx.x == 0 ? found.begin : found.end) = boundary_of(share + threadIdx.x);
}

__device__ __forceinline__ int query_of_item(const AttentionParams& p, int item) { return item % p.num_queries; }
__device__ __forceinline__ int head_tile_of_item(const AttentionParams& p, int item) { return item / p.num_queries; }

// The share of this CTA, such that neighbouring CTAs take different head tiles of the same queries. Each head tile's
// first share begins with an item. So a CTA still waits only for CTAs of lower numbers.
__device__ __forceinline__ int share_side_by_side(const AttentionParams& p) {
    const uint32_t head_tiles = num_head_tiles(p), of_tile = gridDim.x / head_tiles;
    if (of_tile * head_tiles != gridDim.x) return blockIdx.x;
    return blockIdx.x / head_tiles + blockIdx.x % head_tiles * of_tile;
}

// Loads a share from the plan. All threads must meet afterwards.
template <int THREADS>
__device__ __forceinline__ void load_share(const AttentionParams& p, int share, Share<THREADS>& found) {
    if (threadIdx.x != 0) return;
    const int4 planned = __ldcg(p.plan + share);
    found.begin = {planned.x, planned.y};
    found.end = {planned.z, planned.w};
}

// Stores a share for later launches, unless `plan` is null.
template <int THREADS>
__device__ __forceinline__ void leave_share(int4* plan, int share, const Share<THREADS>& found) {
    if (plan == nullptr || threadIdx.x != 0) return;
    plan[share] = make_int4(found.begin.item, found.begin.pair, found.end.item, found.end.pair);
}
