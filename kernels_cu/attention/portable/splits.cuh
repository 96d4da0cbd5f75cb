// Part of portable: the splits of a CTA, one after the other.
#pragma once
#include "attention/portable/plan.cuh"
#include "ptx/named_barrier.cuh"

// Whether the launch's rows are divided into shares (division/share.cuh). If not, a CTA has one split: grid x = query
// * head tiles + head tile, y = split.
__device__ __forceinline__ bool in_shares(const AttentionParams& p) { return p.ready != nullptr; }

// How many splits this CTA has.
__device__ __forceinline__ int num_turns(const AttentionParams& p) {
    return in_shares(p) ? small().share.num_items() : 1;
}

__device__ __forceinline__ bool has_next(const AttentionParams& p) { return small().turn + 1 < num_turns(p); }

// Finds this CTA's split number `turn`, and stores it as the next. One thread calls.
__device__ __forceinline__ void find_split(const AttentionParams& p, int turn) {
    Small& sm = small();
    WorkItem& w = sm.next;
    const int item = in_shares(p) ? sm.share.last_item() - turn : int(blockIdx.x), head_tiles = num_head_tiles(p);
    sm.next_ends_item = true;
    if (!in_shares(p)) {
        find_item(p, w, item / head_tiles, item % head_tiles, blockIdx.y, p.num_splits);
        return;
    }
    find_item(p, w, query_of_item(p, item), head_tile_of_item(p, item), 0, 1);
    const Boundary begin = sm.share.begin, end = sm.share.end;
    if (item == begin.item) w.begin = 2 * begin.pair;
    if (item == end.item) {
        w.end = 2 * end.pair;
        sm.next_ends_item = false;
    }
}

// Goes on to the next split, or restarts this one. Returns whether there is one. Output warps (OUTPUT) and score warps
// call.
template <bool OUTPUT>
__device__ __forceinline__ bool take_next_split(const AttentionParams& p) {
    Small& sm = small();
    const bool sets = OUTPUT && read_thread_index() == 0;
    if (!OVERLAP_SPLITS && sets && has_next(p)) find_split(p, sm.turn + 1);
    named_barrier_sync(NEXT_SPLIT, THREADS);
    if (sets) {
        sm.stage = sm.next_stage, sm.phase = sm.next_phase;
        sm.restarted = sm.restarts;
        if (!sm.restarts) {
            ++sm.turn;
            sm.work = sm.next;
            sm.ends_item = sm.next_ends_item;
            sm.partials = 0;
        }
        sm.expected = sm.restarts ? sm.tiles : sm.work.end - sm.work.begin;
    }
    named_barrier_sync(NEXT_SPLIT, THREADS);
    return sm.turn < num_turns(p);
}
