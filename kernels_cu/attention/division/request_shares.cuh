// Shares of requests, whose rows come from a block table: as shares.cuh, but a launch behind merges what shares have of
// a cut item (dense_combine.cu). So no CTA waits for another one, however many have a part of an item.
//
//   all rows of the call   |request 0   |request 1   |request 2   |          (and once more for each further HEADS lines)
//   shares of the CTAs     |CTA 0  |CTA 1  |CTA 2  |CTA 3  |CTA 4  |
//
//   whole in a share: the CTA writes the results        cut: each CTA leaves a partial result
#pragma once
#include "attention/dense.cuh"
#include "attention/division/find_share.cuh"
#include "attention/division/partials.cuh"

// Calls with one schedule have one plan, as in share.cuh. Lengths may be others than those that it was made for: then
// shares are unequal, and where a request ends before a place where the plan cuts it, a part of it has no rows.

// Finds a share of items of requests, or of equal splits of each, or loads it; pairs_at(request) says how many pairs of
// tiles one has. It is left to the launch that merges, and to later calls. All threads call.
template <int THREADS, typename Pairs>
__device__ __forceinline__ void find_request_share(const DenseParams& p, int share, Share<THREADS>& mine,
                                                   Pairs pairs_at) {
    if (p.num_splits > 1) {
        auto boundary = [&](uint32_t n) -> Boundary {  // the first split has rows if any has
            const int item = n / p.num_splits, split = n % p.num_splits;
            return {item, split == 0 ? 0 : ceil_div(pairs_at(query_of_item(p, item)) * split, p.num_splits)};
        };
        if (threadIdx.x < 2) (threadIdx.x == 0 ? mine.begin : mine.end) = boundary(share + threadIdx.x);
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

// The partial result that a share leaves of an item: it has one place for the item with which it ends, one for that with
// which it begins. Where each item has splits of its own, a share is of one item.
__device__ __forceinline__ PartialResults<8> partial_of(const DenseParams& p, int share, bool is_last_item) {
    return {p.cluster_parts, p.num_splits > 1 ? share : 2 * share + !is_last_item};
}

template <int THREADS>
struct RequestShares : FromGrid {
    static constexpr End END = End::COMBINE;
    using Turn = TurnOf<false>;
    struct State {
        Share<THREADS> mine;
        int number;  // of the share
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
        if (!mine.begins(item)) w.begin = 2 * mine.begin.pair;  // not 0, which would begin the item
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
