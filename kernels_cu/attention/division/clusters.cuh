// Clusters: each CTA of a cluster takes one split of the cluster's work item. The CTAs write their partial results,
// meet at the cluster's barrier, and each merges a share of the output (merge.cuh).
//
//   clusters   |      0      |      1      | ...
//   CTAs       | 0 | 1 | 2   | 3 | 4 | 5   | ...
//   items      |   0         |   1         | ...       INTERLEAVE_TILES: of three CTAs each takes every third tile
#pragma once
#include "attention/division/merge.cuh"
#include "attention/division/turn.cuh"
#include "ptx/cluster.cuh"

struct Clusters : FromGrid {
    static constexpr End END = End::MEET;
    using Turn = TurnOf<INTERLEAVE_TILES>;
    static constexpr bool ONE_TURN = true, EQUAL_SPLITS = true;

    static __device__ __forceinline__ int find_query(const AttentionParams& p, const State&, int) {
        const int item = cluster_index();
        return item / num_head_tiles(p);
    }
    template <typename Work>
    static __device__ __forceinline__ Work find_turn(const AttentionParams& p, const State& state, int turn) {
        Work w;
        const int item = cluster_index();
        find_equal_split(p, w, item / num_head_tiles(p), item % num_head_tiles(p), cluster_rank, cluster_size);
        return w;
    }

    template <typename Results>
    static __device__ __forceinline__ void end_turn(const AttentionParams& p, State&, int, Results results) {
        const ClusterResults<Results::VALUES> partials(p, cluster_index());
        results.write(partials);
        results.sync();
        cluster_sync_with_one_fence(threadIdx.x == 0);
        results.merge(partials);
    }
    // The producer threads arrive, too: cluster barriers count every thread.
    static __device__ __forceinline__ void leave() { cluster_sync_with_one_fence(false); }
};
