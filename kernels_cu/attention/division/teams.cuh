// Teams: CTAs that work on the splits of a work item and merge their partial results as the CTAs of a cluster do
// (merge.cuh), but that are launched one by one. A cluster must find its SMs within a GPC; a team finds them anywhere, so
// that 44 teams of three run at a time where 39 clusters do. And teams may differ in size:
//
//   items   |    item 0     | item 1 |  item 2   | ...      longer lists have more CTAs
//   CTAs    | 0 | 1 | 2 | 3 | 4 | 5  | 6 | 7 | 8 | ...
//
//   lists equally long     p.num_splits CTAs each
//   lists with lengths     p.num_splits is 1, and the CTAs of the launch, at least one an item, are shared out by length:
//                          a quota of tiles is found that no CTA exceeds. Every CTA finds its team by itself, all of them
//                          the same teams. CTAs that are left over end at once
//
// Nothing says that the CTAs of a team run at the same time, and a CTA may not wait for one that has not been started.
// Each has a word, p.ready[its place], in which the others see how far it is:
//
//   join_team       at the start         STARTED
//   all_have_joined before the meeting   whether this CTA has seen the others start: then it may wait for them
//   meet_team       after the split      WAITS or IS_GONE, with its partial result left. Those that wait do so until all
//                                        have left theirs. If none is gone, each merges its share of the output, else
//                                        the first of those that wait merges all. (One waits: of any two CTAs one sees
//                                        the other start.)
//   leave_team      at the end           the last of those that waited clears the words
//
// Both ways give the same bits. The words hold the run's nonce, so that what an earlier user of the memory left there
// says nothing, and are cleared in the end, so that a captured graph can be run again.
#pragma once
#include "attention/division/merge.cuh"
#include "attention/division/turn.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/warp.cuh"

// What is added to the nonce in a CTA's word.
enum TeamState : uint64_t { STARTED = 1, WAITS = 2, IS_GONE = 3 };

// The CTAs in places first .. first + size - 1 of the launch, of which this one is number `split`. Size 0: this CTA has
// no team.
struct Team {
    int first, size, split;
    int query, head_tile;  // of the item
};

// What a CTA merges of its team's item: share `rank` of `mergers`; nothing if that is 0.
struct Merging {
    int rank, mergers;
};

// Of the CTAs of a team that waited, how many have seen before this one that they need not any more. Looked at where the
// number has arrived in any case.
struct Waiting {
    uint32_t ctas, before;
};

// How teams are found by length. QUOTAS are tried; the CTAs of a query that each takes are in 16 bits of `needed`.
constexpr int QUOTAS = 4;
template <int WARPS>
struct TeamPlan {
    int tiles[WARPS], most[WARPS];  // of the queries of each warp's threads: all tiles, those of the longest lists
    uint32_t needed[QUOTAS / 2][WARPS];
    Team team;
};

// The quotient, rounded up. Exact where it is small.
__device__ __forceinline__ int quotient_up(int x, int y) { return int(__fdividef(float(x + y) - 0.5f, float(y))); }

// The CTAs of a query of so many tiles, if each is to have at most `quota`.
__device__ __forceinline__ uint32_t ctas_for(int tiles, int quota) {
    return min(quotient_up(tiles, quota), MAX_CLUSTER);
}

// Finds this CTA's team where lists have lengths. Thread i looks at query i. All threads call, and the CTA must meet
// afterwards.
template <int WARPS>
__device__ __forceinline__ void find_uneven_team(const AttentionParams& p, TeamPlan<WARPS>& plan) {
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), query = threadIdx.x;
    // Each tile of heads has the same teams. Of its CTAs this is number `place`.
    const int head_tiles = num_head_tiles(p), ctas = gridDim.x / head_tiles, head_tile = blockIdx.x % head_tiles,
              place = blockIdx.x / head_tiles;
    if (threadIdx.x == 0) plan.team.size = 0;
    wait_for_earlier_kernels();
    int tiles = 0;
    if (query < p.num_queries) {
        // Both lengths are asked for before either is looked at.
        const int b = query_by_branch(p, query).b;
        int of_main = p.main.topk, of_extra = p.extra.topk;
        if (p.main.lengths != nullptr) of_main = p.main.lengths[b];
        if (p.extra.lengths != nullptr) of_extra = p.extra.lengths[b];
        tiles = ceil_div(max(0, min(of_main, p.main.topk)), TILE_ROWS) +
                ceil_div(max(0, min(of_extra, p.extra.topk)), TILE_ROWS);
        tiles = max(1, tiles);
    }
    const int of_warp = __reduce_add_sync(~0u, tiles), most_of_warp = __reduce_max_sync(~0u, tiles);
    if (lane == 0) plan.tiles[warp] = of_warp, plan.most[warp] = most_of_warp;
    __syncthreads();

    // `least` tiles a CTA are needed, and with `enough` the CTAs suffice however lengths fall.
    const int all = __reduce_add_sync(~0u, lane < WARPS ? plan.tiles[lane] : 0);
    const int most = __reduce_max_sync(~0u, lane < WARPS ? plan.most[lane] : 0);
    const int least = max(1, quotient_up(all, ctas)), spare = ctas - p.num_queries;
    const int enough = spare > 0 ? min(most, quotient_up(all - p.num_queries, spare)) : most;
    const int step = max(1, (enough - least + QUOTAS - 2) / (QUOTAS - 1));
    uint32_t sizes[QUOTAS / 2] = {};
    if (tiles > 0) {
#pragma unroll
        for (int i = 0; i < QUOTAS; ++i) sizes[i / 2] |= ctas_for(tiles, least + i * step) << 16 * (i % 2);
    }
#pragma unroll
    for (int i = 0; i < QUOTAS / 2; ++i) {
        const uint32_t needed = __reduce_add_sync(~0u, sizes[i]);
        if (lane == 0) plan.needed[i][warp] = needed;
    }
    __syncthreads();

    // The least that is enough; if none is, one CTA a query.
    int size = tiles > 0, before = 32 * warp;
#pragma unroll
    for (int i = QUOTAS - 1; i >= 0; --i) {
        const uint32_t needed = lane < WARPS ? plan.needed[i / 2][lane] >> 16 * (i % 2) & 0xffff : 0;
        const bool suffice = int(__reduce_add_sync(~0u, needed)) <= ctas;
        const int of_warps_before = __reduce_add_sync(~0u, lane < warp ? needed : 0);
        if (suffice) size = sizes[i / 2] >> 16 * (i % 2) & 0xffff, before = of_warps_before;
    }
    const int split = place - (before + inclusive_sum(size, lane) - size);
    if (split >= 0 && split < size) plan.team = {head_tile * ctas + place - split, size, split, query, head_tile};
}

// Finds this CTA's team, and waits for earlier launches where lists have lengths. All threads call, and the CTA must meet
// afterwards.
template <int WARPS>
__device__ __forceinline__ void find_team(const AttentionParams& p, TeamPlan<WARPS>& plan) {
    if (p.num_splits == 1) {
        find_uneven_team(p, plan);
    } else if (threadIdx.x == 0) {
        const int head_tiles = num_head_tiles(p), item = int(blockIdx.x) / p.num_splits,
                  split = int(blockIdx.x) % p.num_splits;
        plan.team = {int(blockIdx.x) - split, p.num_splits, split, item / head_tiles, item % head_tiles};
    }
}

__device__ __forceinline__ int index_of(const Team& team) { return team.first + team.split; }

// How many of a team have met. Its first CTA sets it to 0 before it leaves its partial result.
__device__ __forceinline__ unsigned* have_met(const AttentionParams& p, const Team& team) {
    return reinterpret_cast<unsigned*>(p.ready + gridDim.x + team.first);
}

// One thread calls.
__device__ __forceinline__ void join_team(const AttentionParams& p, const Team& team) {
    if (team.split == 0) *have_met(p, team) = 0;
    store_relaxed(p.ready + index_of(team), p.nonce + STARTED);
    __threadfence();  // between this word and what all_have_joined reads
}

// Whether all CTAs of the team have started. One warp calls; in it thread 0, which has joined.
__device__ __forceinline__ bool all_have_joined(const AttentionParams& p, const Team& team, int lane) {
    uint64_t state = STARTED;
    if (lane < team.size) state = load_acquire(p.ready + team.first + lane) - p.nonce;
    return __all_sync(~0u, state - STARTED <= IS_GONE - STARTED);
}

// One warp calls, once those that wrote the partial result have met it. What the other CTAs of the team left can be read
// afterwards by all threads that meet the warp, if there is something to merge.
__device__ __forceinline__ Merging meet_team(const AttentionParams& p, const Team& team, bool all_joined, int lane,
                                             Waiting& waiting) {
    if (lane == 0) store_release(p.ready + index_of(team), p.nonce + (all_joined ? WAITS : IS_GONE));
    if (!all_joined) return {0, 0};
    uint64_t state = WAITS;
    do {
        if (lane < team.size) state = load_acquire(p.ready + team.first + lane) - p.nonce;
    } while (__any_sync(~0u, state - WAITS > IS_GONE - WAITS));
    const uint32_t waited = __ballot_sync(~0u, lane < team.size && state == WAITS);
    waiting.ctas = __popc(waited);
    if (lane == 0) waiting.before = atomicAdd(have_met(p, team), 1);
    if (waiting.ctas == team.size) return {team.split, team.size};
    return {0, __ffs(waited) - 1 == team.split};
}

// Thread 0 calls, which was in that warp.
__device__ __forceinline__ void leave_team(const AttentionParams& p, const Team& team, const Waiting& waiting) {
    if (waiting.before + 1 != waiting.ctas) return;
#pragma unroll 1
    for (int i = 0; i < team.size; ++i) p.ready[team.first + i] = 0;
}

// --- the division ---------------------------------------------------------------------------------------------

template <int THREADS>
struct Teams : FromGrid {
    static constexpr End END = End::MEET;
    using Turn = TurnOf<TILES_IN_TURN>;
    static constexpr bool ONE_TURN = true, EQUAL_SPLITS = true, HAS_WAITED = true;
    struct State {
        TeamPlan<THREADS / 32> plan;
        Merging merging;
    };

    static __device__ __forceinline__ void begin(const AttentionParams& p, State& state, int) {
        find_team(p, state.plan);
    }
    static __device__ __forceinline__ bool is_idle(const State& state) { return state.plan.team.size == 0; }
    // One thread calls.
    static __device__ __forceinline__ void join(const AttentionParams& p, const State& state) {
        join_team(p, state.plan.team);
    }

    static __device__ __forceinline__ int find_query(const AttentionParams&, const State& state, int) {
        return state.plan.team.query;
    }
    template <typename Work>
    static __device__ __forceinline__ Work find_turn(const AttentionParams& p, const State& state, int) {
        Work w;
        const Team& team = state.plan.team;
        find_equal_split(p, w, team.query, team.head_tile, [&] { return team.split; }, [&] { return team.size; });
        return w;
    }

    template <typename Results>
    static __device__ __forceinline__ void end_turn(const AttentionParams& p, State& state, int, Results results) {
        constexpr int VALUES = Results::VALUES;
        const bool meets = results.is_first_warp();  // the other CTAs' warps that do
        const int lane = results.lane();
        const Team& team = state.plan.team;
        const bool all_joined = meets && all_have_joined(p, team, lane);
        results.write({p.cluster_parts, index_of(team)});
        results.sync();
        Waiting waiting = {0, 0};
        if (meets) {
            const Merging merging = meet_team(p, team, all_joined, lane, waiting);
            if (lane == 0) state.merging = merging;
        }
        results.sync();
        const Merging& merging = state.merging;
        if (merging.mergers > 0) {
            float4* first = p.cluster_parts + int64_t(team.first) * PartialResults<VALUES>::STEP;
            results.merge(ClusterResults<VALUES>(first, merging.rank, team.size, merging.mergers));
        }
        if (threadIdx.x == 0) leave_team(p, team, waiting);
    }
};
