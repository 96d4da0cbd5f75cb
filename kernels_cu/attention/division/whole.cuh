// Whole work items: a CTA takes one after the other, and stores the results of each.
//
//   CTAs    | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 | 0 | ...       Whole
//   items   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | ...
//
//   CTAs    | 0 | 1 | 2 | 3 | 3 | 2 | 1 | 0 | 0 | ...       for_each_item: where items are ordered by length
#pragma once
#include "attention/division/turn.cuh"

// Turns do not depend on what earlier launches write, unless lists have lengths.
struct Whole : FromGrid {
    static constexpr End END = End::STORE;
    using Turn = TurnOf<false>;
    static constexpr bool FOUND_EARLY = true;

    static __device__ __forceinline__ int num_turns(const AttentionParams& p, const State&) {
        return ceil_div(p.num_queries * num_head_tiles(p) - int(blockIdx.x), gridDim.x);
    }
    static __device__ __forceinline__ int item_of(int turn) { return blockIdx.x + turn * gridDim.x; }
    static __device__ __forceinline__ int find_query(const AttentionParams& p, const State&, int turn) {
        return item_of(turn) / num_head_tiles(p);
    }
    template <typename Work>
    static __device__ __forceinline__ Work find_turn(const AttentionParams& p, const State& state, int turn) {
        Work w;
        find_whole_item(p, w, find_query(p, state, turn), item_of(turn) % num_head_tiles(p));
        return w;
    }

    template <typename Results>
    static __device__ __forceinline__ void end_turn(const AttentionParams&, State&, int, Results results) {
        results.finish();
    }
};

// Deals `total()` items out to workers (CTAs or warpgroups). For each item of this worker it calls `act(find(item))`,
// unless find returns a negative number: then there is nothing to do. All lanes of the warp call.
//
// The direction changes from round to round, so that no worker gets the longest item of every round if items are
// ordered by length. The lanes of a warp find 32 items at once: one load of memory after the other would cost 1 us of
// about 30.
template <typename Total, typename Workers, typename Find, typename Act>
__device__ __forceinline__ void for_each_item(Total total, int worker, Workers workers, Find find, Act act) {
#pragma unroll 1
    for (int n = 0; n * workers() < total(); n += 32) {
        const int lane = threadIdx.x % 32;
        const int item = (n + lane) * workers() + (lane % 2 == 0 ? worker : workers() - 1 - worker);
        int mine = item < total() ? find(item) : -1;
#pragma unroll 1
        while (const uint32_t left = __ballot_sync(~0u, mine >= 0)) {
            const int first = __ffs(left) - 1, found = __shfl_sync(~0u, mine, first);
            if (threadIdx.x % 32 == first) mine = -1;
            act(found);
        }
    }
}

// Whether another kernel has already written the query's results.
__device__ __forceinline__ bool has_results(const AttentionParams& p, int query) {
    return p.flags & SOME_DONE && p.main.lengths[query / p.s_q] < 0;
}

// `find` of for_each_item: query * head_tiles + head tile of an item, in the order of p.order; -1 if the query has its
// results.
__device__ __forceinline__ int find_head_tile(const AttentionParams& p, int item, int head_tiles) {
    const int n = item / head_tiles, query = p.order == nullptr ? n : p.order[n];
    return has_results(p, query) ? -1 : query * head_tiles + item % head_tiles;
}
