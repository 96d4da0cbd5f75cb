// Segments: a CTA takes whole work items in turn. It works on the splits of an item one after the other, with the same
// Q, and keeps their partial results. After the item's last split it merges them, in the way of a cluster and to the
// same bits.
//
//   CTAs     |     0     |     1     |     0     |     1     | ...
//   items    |     0     |     1     |     2     |     3     | ...
//   splits   | 0 | 1 | 2 | 0 | 1 | 2 | 0 | 1 | 2 | 0 | 1 | 2 | ...
#pragma once
#include "attention/division/merge.cuh"
#include "attention/division/turn.cuh"

struct Segments : FromGrid {
    static constexpr End END = End::KEEP;
    using Turn = TurnOf<INTERLEAVE_TILES>;
    static constexpr bool EQUAL_SPLITS = true;

    static __device__ __forceinline__ int num_turns(const AttentionParams& p, const State&) {
        const int items = ceil_div(p.num_queries * num_head_tiles(p) - int(blockIdx.x), gridDim.x);
        return items * p.num_splits;
    }
    static __device__ __forceinline__ int item_of(const AttentionParams& p, int turn) {
        return blockIdx.x + turn / p.num_splits * gridDim.x;
    }
    static __device__ __forceinline__ int split_of(const AttentionParams& p, int turn) { return turn % p.num_splits; }
    static __device__ __forceinline__ int find_query(const AttentionParams& p, const State&, int turn) {
        return item_of(p, turn) / num_head_tiles(p);
    }
    template <typename Work>
    static __device__ __forceinline__ Work find_turn(const AttentionParams& p, const State& state, int turn) {
        Work w;
        find_equal_split(
            p, w, find_query(p, state, turn), item_of(p, turn) % num_head_tiles(p), [&] { return split_of(p, turn); },
            [&] { return p.num_splits; });
        w.ends_item = split_of(p, turn + 1) == 0;
        return w;
    }

    // The partial results of the item's earlier splits are written.
    template <typename Results>
    static __device__ __forceinline__ void end_turn(const AttentionParams& p, State&, int turn, Results results) {
        results.keep(split_of(p, turn));
        if (results.ends_item()) results.store();
    }
};
