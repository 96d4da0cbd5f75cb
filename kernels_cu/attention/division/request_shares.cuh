// Shares for dense attention, whose rows come from a block table. As shares.cuh, but a second launch
// (dense_combine.cu) merges what shares have of an item that is cut. So no CTA waits for another one, however many
// have a part of an item.
//
//   all rows of the call   |request 0   |request 1   |request 2   |          (again for each further HEADS lines)
//   shares of the CTAs     |CTA 0  |CTA 1  |CTA 2  |CTA 3  |CTA 4  |
//
//   item within one share: its CTA writes the results       item cut: each CTA writes a partial result
#pragma once
#include "attention/dense.cuh"
#include "attention/division/find_share.cuh"
#include "attention/division/partials.cuh"

// Calls with the same schedule use the same plan (share.cuh). The plan may have been made for other lengths. Then
// shares are unequal, and where a request ends before a boundary of the plan, a part of it has no rows.

// Finds this CTA's share, or loads it from the plan, and stores it for dense_combine.cu and for later calls.
// pairs_at(request) returns the number of a request's pairs of tiles. All threads call.
template <int THREADS, typename Pairs>
__device__ __forceinline__ void find_request_share(const DenseParams& p, int share, Share<THREADS>& mine,
                                                   Pairs pairs_at) {
    if (p.num_splits > 1) {
        auto boundary = [&](uint32_t n) -> Boundary {  // rounded such that the first split has rows if any split has
            const int item = n / p.num_splits, split = n % p.num_splits;
            return {item, split == 0 ? 0 : ceil_div(pairs_at(query_of_item(p, item)) * split, p.num_splits)};
        };
        set_boundaries(mine, share, boundary);
        __syncthreads();
    } else if (p.plan_filled > 0) {
        load_share(p, share, mine);
        __syncthreads();
    } else {
        find_uneven_share(p, share, mine, pairs_at);
        leave_share(p.plan, share, mine);
    }
    leave_share(p.shares, share, mine);
}

// The place of a share's partial result. A share has at most two: of the item with which it ends, and of the item with
// which it begins. With p.num_splits > 1 a share has one item, and one place.
__device__ __forceinline__ PartialResults<8> partial_of(const DenseParams& p, int share, bool is_last_item) {
    return {p.cluster_parts, p.num_splits > 1 ? share : 2 * share + !is_last_item};
}

template <int THREADS>
struct RequestShares : FromGrid {
    static constexpr End END = End::COMBINE;
    using Turn = TurnOf<false>;
    struct State {
        Share<THREADS> mine;
        int number;  // of this CTA's share
    };

    static __device__ __forceinline__ void begin(const AttentionParams& p, State& state, int) {
        if (threadIdx.x == 0) state.number = share_side_by_side(p);
    }
    static __device__ __forceinline__ void finish(const AttentionParams& p, State& state, int, uint16_t*) {
        find_request_share(dense(p), state.number, state.mine, [&](int request) { return pairs_of(p, request); });
    }

    static __device__ __forceinline__ int num_turns(const AttentionParams&, const State& state) {
        return state.mine.num_items();
    }
    template <typename Work>
    static __device__ __forceinline__ Work find_turn(const AttentionParams& p, const State& state, int turn) {
        Work w;
        const Share<THREADS>& mine = state.mine;
        const int item = mine.begin.item + turn;
        find_whole_item(p, w, query_of_item(p, item), head_tile_of_item(p, item));
        if (!mine.begins(item)) w.begin = 2 * mine.begin.pair;  // never 0, which would mean the item's begin
        w.ends_item = mine.ends(item);
        if (!w.ends_item) w.end = min(w.end, 2 * mine.end.pair);
        w.end = max(w.begin, w.end);
        return w;
    }

    template <typename Results>
    static __device__ __forceinline__ void end_turn(const AttentionParams& p, State& state, int, Results results) {
        if (results.begins_item() && results.ends_item()) {
            results.finish();
        } else {
            results.write(partial_of(dense(p), state.number, !results.ends_item()));
        }
    }
};
