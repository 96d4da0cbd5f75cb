// Division of a launch's work into equal shares, one a CTA. A work item (a query and a tile of its heads) is divided
// where a share ends within it.
//
//   items   |    item 0    |    item 1    |    item 2    |    item 3    |
//   shares  |    share 0    |    share 1    |    share 2    |    share 3    | ...
//
// Items are numbered by tiles of heads first: those of all queries' first heads, then those of the next. So the two
// tiles of a query are half of the shares apart and worked on at the same time, and its rows come from memory once. A
// share is that of the CTA of its number, or the two stand side by side (share_side_by_side).
//
// A CTA works on its share backwards. So it begins with the split of an item that ends in a later share, and leaves a
// partial result. It comes last to the split that ends the item with which its share begins, and merges what the shares
// before it have left, which did that first. A CTA waits for CTAs of lower numbers alone. Those have been started, so
// this cannot hang. Partial results are merged in the order of shares: the bits do not depend on who was first.
//
// ready[share] says that a partial result is there. It holds the run's nonce, so that what an earlier user of the memory
// left there says nothing, and is cleared by the CTA that merges, so that a captured graph can be run again.
#pragma once
#include "attention/division/partials.cuh"
#include "attention/division/turn.cuh"
#include "ptx/global.cuh"
#include "tile/warp.cuh"

// What a pair of tiles costs. Beside them an item costs, for Q, first rows and results, p.item_cost where all lists are
// equally long, with which the slowest share takes the least time, otherwise the kernel's UNEVEN_ITEM_COST.
constexpr int PAIR_COST = 8;

// What is added to the nonce in ready[share].
enum Ready { IS_LEFT = 1, BEGINS_ITEM = 2 };

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

// The share of a CTA where neighbouring CTAs take the same queries, a tile of heads each. Each tile's first share begins
// with an item, so that a CTA still waits for CTAs before it alone.
__device__ __forceinline__ int share_side_by_side(const AttentionParams& p) {
    const uint32_t head_tiles = num_head_tiles(p), of_tile = gridDim.x / head_tiles;
    if (of_tile * head_tiles != gridDim.x) return blockIdx.x;
    return blockIdx.x / head_tiles + blockIdx.x % head_tiles * of_tile;
}

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

// What a look at two entries of each main list, or at its length, tells: all are full, or none goes beyond FEW_PAIRS.
enum class Look { FULL, FEW, OTHER };
constexpr int FEW_PAIRS = 2;
template <int THREADS>
__device__ __forceinline__ Look look_at_lists(const AttentionParams& p) {
    const int behind = min(FEW_PAIRS * 2 * TILE_ROWS, p.main.topk - 1);
    bool full = true, few = true;
#pragma unroll 1
    for (int index = threadIdx.x; index < p.num_queries; index += THREADS) {
        const Query query = query_by_branch(p, index);
        if (has_lengths(p)) {
            full &= list_length(p.main, query.b) == p.main.topk;
            few &= pairs_of(p, index) <= FEW_PAIRS;
        } else {
            const int32_t* list = list_of(p.main, query);
            const int32_t last = list[p.main.topk - 1], entry = list[behind];
            full &= last >= 0;
            few &= entry < 0;
        }
    }
    if (__syncthreads_and(full)) return Look::FULL;
    return __syncthreads_and(few) ? Look::FEW : Look::OTHER;
}

// The pairs of tiles of a query's main list whose entries stand in front, behind them -1: up to the last pair that
// begins with an entry, at least 1. Where -1 stands elsewhere, too, it is some number of pairs that the list has.
__device__ __forceinline__ int listed_pairs(const AttentionParams& p, int query) {
    constexpr int PROBES = 4;  // entries that are asked for at a time
    const int32_t* list = list_of(p.main, query_by_branch(p, query));
    int low = 0, high = ceil_div(p.main.topk, 2 * TILE_ROWS);  // pair `low` begins with an entry, `high` does not
#pragma unroll 1
    while (high - low > 1) {
        const int begin = low, size = high - low;
        int32_t entries[PROBES];
        auto pair_of = [&](int i) { return begin + min(ceil_div(size * (i + 1), PROBES + 1), size - 1); };
#pragma unroll
        for (int i = 0; i < PROBES; ++i) entries[i] = list[pair_of(i) * 2 * TILE_ROWS];
#pragma unroll
        for (int i = PROBES - 1; i >= 0; --i) {
            if (entries[i] < 0) high = pair_of(i);
        }
#pragma unroll
        for (int i = 0; i < PROBES; ++i) {
            if (pair_of(i) < high) low = pair_of(i);
        }
    }
    return low + 1;
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

// As find_share; main lists without lengths count up to where -1 begins, as they are divided. What is worked on are
// lists to their ends. `listed` is shared memory for a number for each query. There is one search for both: a second
// copy of its code costs launches that never run it.
constexpr int MOST_LISTED = 4096;
template <int THREADS>
__device__ __forceinline__ void find_listed_share(const AttentionParams& p, int share, Share<THREADS>& found,
                                                  uint16_t* listed) {
    const bool lengths = has_lengths(p);
    if (p.num_splits > 1) {
        if (lengths) find_split_share(p, share, found);
        return;
    }
    if (!lengths && (p.extra.topk > 0 || p.num_queries > MOST_LISTED || p.main.topk <= 2 * TILE_ROWS)) return;
    const Look look = divided_alike(p) ? look_at_lists<THREADS>(p) : Look::OTHER;
    if (look == Look::FULL) return;
    if (look == Look::FEW) {
        find_whole_share(p, share, found);
        return;
    }
    if (!lengths) {
#pragma unroll 1
        for (int query = threadIdx.x; query < p.num_queries; query += THREADS) listed[query] = listed_pairs(p, query);
        __syncthreads();
    }
    find_uneven_share(p, share, found, [&](int query) { return lengths ? pairs_of(p, query) : int(listed[query]); });
}

// --- plans ----------------------------------------------------------------------------------------------------
//
// Calls with one schedule, as those of a step's layers, have one plan. The first launch leaves the shares that its CTAs
// find in p.plan, and later ones load them. All have lists of as many entries, so the plan divides each of them, evenly
// or not: where a list has lengths (ALIKE) and ends before a place where the plan cuts it, a split has no tiles.

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

// As find_listed_share, or loads what an earlier launch has found. All threads call.
template <int THREADS>
__device__ __forceinline__ void find_planned_share(const AttentionParams& p, int share, Share<THREADS>& found,
                                                   uint16_t* listed) {
    if (p.plan_filled > 0) {
        load_share(p, share, found);
        __syncthreads();
    } else {
        find_listed_share(p, share, found, listed);
        leave_share(p.plan, share, found);
    }
}

// --- partial results ------------------------------------------------------------------------------------------

// Say that a share's partial result is there. The threads that wrote it must have met this one.
__device__ __forceinline__ void announce_partial(const AttentionParams& p, int share, bool begins_item) {
    store_release(p.ready + share, p.nonce + IS_LEFT + (begins_item ? BEGINS_ITEM : 0));
}

// Wait for the partial results of the item that began before a share, and return how many there are: those of the shares
// just before. One warp calls.
__device__ __forceinline__ int wait_for_partials(const AttentionParams& p, int share, int lane) {
    int count = 0;
#pragma unroll 1
    for (;;) {
        const int before = share - 1 - count - lane;
        const uint64_t state = (before < 0 ? 0 : load_acquire(p.ready + before)) - p.nonce;
        const bool left = state == IS_LEFT || state == IS_LEFT + BEGINS_ITEM;
        const uint32_t missing = __ballot_sync(~0u, !left);
        const uint32_t first = __ballot_sync(~0u, left && state != IS_LEFT);
        const int next = __ffs(first), run = missing == 0 ? 32 : __ffs(missing) - 1;
        if (next != 0 && next <= run) {
            count += next;
            break;
        }
        if (run == 32) count += 32;
    }
    for (int i = lane; i < count; i += 32) p.ready[share - 1 - i] = 0;
    return count;
}

// --- the division ---------------------------------------------------------------------------------------------

template <int THREADS>
struct Shares : FromGrid {
    static constexpr End END = End::LEAVE;
    using Turn = TurnOf<false>;
    static constexpr int SCRATCH_BYTES = 2 * MOST_LISTED;
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
    // Says that this CTA's partial result is there. One thread calls, that has met those that wrote it.
    static __device__ __forceinline__ void announce(const AttentionParams& p, bool begins_item) {
        announce_partial(p, blockIdx.x, begins_item);
    }
    // Waits for the partial results that CTAs before have left of the item that this CTA ends, and returns how many they
    // are. One warp calls.
    static __device__ __forceinline__ int wait_for_earlier(const AttentionParams& p, int lane) {
        return wait_for_partials(p, blockIdx.x, lane);
    }
    // The same. The threads that merge call, among them a warp that `waits`; `count` is in shared memory.
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
