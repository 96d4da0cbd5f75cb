// Shares: the launch's work is divided into equal shares (share.cuh), one for each CTA.
//
//   a CTA's share, worked on backwards     | end of item 7 | item 8 | begin of item 9 |
//                                             3. merge        2.      1. partial result for the CTA with the
//                                                                        end of item 9
//
// So a CTA works first on the item that a later share ends, and writes a partial result. It works last on the item
// that its share ends, and merges the partial results of the earlier shares, which those wrote first
// (share_partials.cuh).
#pragma once
#include "attention/division/listed_share.cuh"
#include "attention/division/partials.cuh"
#include "attention/division/share_partials.cuh"

template <int THREADS>
struct Shares : FromGrid {
    static constexpr End END = End::LEAVE;
    using Turn = TurnOf<false>;
    static constexpr int SCRATCH_BYTES = 2 * MAX_PLANNED_QUERIES;
    using State = Share<THREADS>;

    static __device__ __forceinline__ void begin(const AttentionParams& p, State& share, int cta) {
        find_share_early(p, cta, share);
    }
    static __device__ __forceinline__ void finish(const AttentionParams& p, State& share, int cta, uint16_t* scratch) {
        find_planned_share(p, cta, share, scratch);
    }

    static __device__ __forceinline__ int num_turns(const AttentionParams&, const State& share) {
        return share.num_items();
    }
    static __device__ __forceinline__ int find_query(const AttentionParams& p, const State& share, int turn) {
        return query_of_item(p, share.last_item() - turn);
    }
    template <typename Work>
    static __device__ __forceinline__ Work find_turn(const AttentionParams& p, const State& share, int turn) {
        Work w;
        const int item = share.last_item() - turn;
        find_whole_item(p, w, query_of_item(p, item), head_tile_of_item(p, item));
        const Boundary begin = share.begin, end = share.end;
        if (item == begin.item) w.begin = min(w.end, 2 * begin.pair);
        w.ends_item = item != end.item;
        if (!w.ends_item) w.end = min(w.end, 2 * end.pair);
        return w;
    }

    template <typename Results>
    static __device__ __forceinline__ void end_turn(const AttentionParams& p, State&, int, Results results) {
        if (results.ends_item()) {
            results.finish();
            return;
        }
        results.write({p.cluster_parts, int(blockIdx.x)});
        results.sync();
        if (threadIdx.x == 0) announce(p, results.begins_item());
    }
    // Says that this CTA's partial result is written. One thread calls, once it has met those that wrote it.
    static __device__ __forceinline__ void announce(const AttentionParams& p, bool begins_item) {
        announce_partial(p, blockIdx.x, begins_item);
    }
    // Waits for the partial results that earlier CTAs have of the item that this CTA ends, and returns how many there
    // are. One warp calls.
    static __device__ __forceinline__ int wait_for_earlier(const AttentionParams& p, int lane) {
        return wait_for_partials(p, blockIdx.x, lane);
    }
    // The same for all threads that merge. The warp with `waits` waits for the others; `count` is in shared memory.
    template <typename Sync>
    static __device__ __forceinline__ int count_earlier(const AttentionParams& p, bool begins_item, bool waits,
                                                        int lane, int& count, Sync sync) {
        if (begins_item) return 0;
        if (waits) {
            const int found = wait_for_earlier(p, lane);
            if (lane == 0) count = found;
        }
        sync();
        return count;
    }
};
