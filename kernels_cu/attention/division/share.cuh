// A share: what a CTA has of a launch's work, where that is divided evenly over the CTAs. It may begin and end within a
// work item, which is a query and a tile of its heads.
//
//   items   |    item 0    |    item 1    |    item 2    |    item 3    |
//   shares  |    share 0    |    share 1    |    share 2    |    share 3    | ...
//
// Items are numbered by tiles of heads first: those of all queries' first heads, then those of the next. So the two
// tiles of a query are half of the shares apart and worked on at the same time, and its rows come from memory once. A
// share is that of the CTA of its number, or the two stand side by side (share_side_by_side).
//
// Calls with one schedule, as those of a step's layers, have one plan. The first launch leaves the shares that its CTAs
// find in p.plan, and later ones load them.
#pragma once
#include "attention/division/turn.cuh"

// A place in the order of all pairs of tiles: before pair `pair` of item `item`.
struct Boundary {
    int item, pair;
};

// This CTA's share. Its turns are the items in it, the last one first.
template <int THREADS>
struct Share {
    // Of each warp's queries. Aligned, or ptxas loads a word beside them, too, which racecheck takes for a race.
    alignas(16) uint32_t costs[THREADS / 32];
    Boundary begin, end;

    __device__ __forceinline__ int last_item() const {
        const Boundary behind = end;
        return behind.pair > 0 ? behind.item : behind.item - 1;
    }
    __device__ __forceinline__ int num_items() const { return last_item() + 1 - begin.item; }
    // Whether the share has the begin, and the end, of an item in it.
    __device__ __forceinline__ bool begins(int item) const { return item != begin.item || begin.pair == 0; }
    __device__ __forceinline__ bool ends(int item) const { return item != end.item; }
};

__device__ __forceinline__ int query_of_item(const AttentionParams& p, int item) { return item % p.num_queries; }
__device__ __forceinline__ int head_tile_of_item(const AttentionParams& p, int item) { return item / p.num_queries; }

// The share of a CTA where neighbouring CTAs take the same queries, a tile of heads each. Each tile's first share
// begins with an item, so that a CTA still waits for CTAs before it alone.
__device__ __forceinline__ int share_side_by_side(const AttentionParams& p) {
    const uint32_t head_tiles = num_head_tiles(p), of_tile = gridDim.x / head_tiles;
    if (of_tile * head_tiles != gridDim.x) return blockIdx.x;
    return blockIdx.x / head_tiles + blockIdx.x % head_tiles * of_tile;
}

// Loads a share that an earlier launch has left. The CTA must meet afterwards.
template <int THREADS>
__device__ __forceinline__ void load_share(const AttentionParams& p, int share, Share<THREADS>& found) {
    if (threadIdx.x != 0) return;
    const int4 planned = __ldcg(p.plan + share);
    found.begin = {planned.x, planned.y};
    found.end = {planned.z, planned.w};
}

// Leaves a share to later launches. `plan`: where, or null.
template <int THREADS>
__device__ __forceinline__ void leave_share(int4* plan, int share, const Share<THREADS>& found) {
    if (plan == nullptr || threadIdx.x != 0) return;
    plan[share] = make_int4(found.begin.item, found.begin.pair, found.end.item, found.end.pair);
}
