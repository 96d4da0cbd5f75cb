// Teams: the CTAs of a team work on the splits of a work item and merge their partial results as those of a cluster do
// (merge.cuh). But they are no cluster. A cluster must find its SMs within one GPC, a team finds them anywhere, so
// that 44 teams of three run at a time where 39 clusters do. And teams may have different sizes:
//
//   items   |    item 0     | item 1 |  item 2   | ...      longer lists have more CTAs
//   CTAs    | 0 | 1 | 2 | 3 | 4 | 5  | 6 | 7 | 8 | ...
//
//   lists of equal length  a team has p.num_splits CTAs
//   lists with lengths     p.num_splits is 1. The launch has at least one CTA an item; they are shared out by length:
//                          a quota is found, the number of tiles that no CTA exceeds. Each CTA computes all teams by
//                          itself, with the same result. CTAs that are left over end at once
//
// The CTAs of a team need not run at the same time, and a CTA must not wait for one that has not started. Each CTA has
// a word, p.ready[its index], in which it tells the others how far it is:
//
//   join_team        at the start: STARTED
//   all_have_joined  before the team meets: whether this CTA sees that the others have started. Then it may wait
//   meet_team        once its partial result is written: WAITS, or GONE if it may not wait. Those that wait do so
//                    until all partial results are written. If none is gone, each merges its share of the output.
//                    Else the first one that waits merges all of it. (At least one waits: the CTA that joins last sees
//                    all others.)
//   leave_team       at the end: the last of those that waited clears the words
//
// Both ways give the same bits. The words hold the run's nonce, so that old contents of the memory mean nothing. They
// are cleared in the end, so that a captured graph can run again.
#pragma once
#include "attention/division/merge.cuh"
#include "attention/division/turn.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/warp.cuh"

// What is added to the nonce in a CTA's word.
enum TeamState : uint64_t { STARTED = 1, WAITS = 2, GONE = 3 };

// A team is CTAs first .. first + size - 1 of the launch, of which this CTA is number `split`. Size 0: this CTA has no
// team.
struct Team {
    int first, size, split;
    int query, head_tile;  // of the item
};

// This CTA's part of the merge: share `rank` of `mergers`. Nothing if `mergers` is 0.
struct Merging {
    int rank, mergers;
};

// Of a team: how many CTAs waited, and how many of these have finished waiting before this one. The counts are read
// late, when they have arrived anyway.
struct Waiting {
    uint32_t ctas, before;
};

// How teams are found by length. NUM_QUOTAS quotas are tried at once. `needed` packs two of them in a word: the
// numbers of CTAs that each warp's queries need under the quota.
constexpr int NUM_QUOTAS = 4;
template <int WARPS>
struct TeamSearch {
    int tiles[WARPS], most[WARPS];  // tiles of each warp's queries: their sum, their maximum
    uint32_t needed[NUM_QUOTAS / 2][WARPS];
    Team team;
};

// x / y, rounded up. Exact where it is small.
__device__ __forceinline__ int quotient_up(int x, int y) { return int(__fdividef(float(x + y) - 0.5f, float(y))); }

// How many CTAs a query of `tiles` tiles needs, if each may have at most `quota`.
__device__ __forceinline__ uint32_t ctas_for(int tiles, int quota) {
    return min(quotient_up(tiles, quota), MAX_CLUSTER);
}

// Finds this CTA's team where lists have lengths. Thread i computes the tiles of query i. All threads call, and must
// meet afterwards.
template <int WARPS>
__device__ __forceinline__ void find_team_by_length(const AttentionParams& p, TeamSearch<WARPS>& plan) {
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), query = threadIdx.x;
    // Each head tile has the same teams. This CTA is number `place` of the head tile's CTAs.
    const int head_tiles = num_head_tiles(p), ctas = gridDim.x / head_tiles, head_tile = blockIdx.x % head_tiles,
              place = blockIdx.x / head_tiles;
    if (threadIdx.x == 0) plan.team.size = 0;
    wait_for_earlier_kernels();
    int tiles = 0;
    if (query < p.num_queries) {
        // Both lengths are loaded before either is used.
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

    // Quotas between `least` and `enough` are tried. With a smaller quota than `least` the CTAs cannot suffice; with
    // `enough` they always do.
    const int all = __reduce_add_sync(~0u, lane < WARPS ? plan.tiles[lane] : 0);
    const int most = __reduce_max_sync(~0u, lane < WARPS ? plan.most[lane] : 0);
    const int least = max(1, quotient_up(all, ctas)), spare = ctas - p.num_queries;
    const int enough = spare > 0 ? min(most, quotient_up(all - p.num_queries, spare)) : most;
    const int step = max(1, (enough - least + NUM_QUOTAS - 2) / (NUM_QUOTAS - 1));
    uint32_t sizes[NUM_QUOTAS / 2] = {};
    if (tiles > 0) {
#pragma unroll
        for (int i = 0; i < NUM_QUOTAS; ++i) sizes[i / 2] |= ctas_for(tiles, least + i * step) << 16 * (i % 2);
    }
#pragma unroll
    for (int i = 0; i < NUM_QUOTAS / 2; ++i) {
        const uint32_t needed = __reduce_add_sync(~0u, sizes[i]);
        if (lane == 0) plan.needed[i][warp] = needed;
    }
    __syncthreads();

    // The smallest quota under which the CTAs suffice decides. If there is none, each query has one CTA.
    int size = tiles > 0, before = 32 * warp;
#pragma unroll
    for (int i = NUM_QUOTAS - 1; i >= 0; --i) {
        const uint32_t needed = lane < WARPS ? plan.needed[i / 2][lane] >> 16 * (i % 2) & 0xffff : 0;
        const bool suffice = int(__reduce_add_sync(~0u, needed)) <= ctas;
        const int of_warps_before = __reduce_add_sync(~0u, lane < warp ? needed : 0);
        if (suffice) size = sizes[i / 2] >> 16 * (i % 2) & 0xffff, before = of_warps_before;
    }
    const int split = place - (before + inclusive_sum(size, lane) - size);
    if (split >= 0 && split < size) plan.team = {head_tile * ctas + place - split, size, split, query, head_tile};
}

// Finds this CTA's team; waits for earlier launches if lists have lengths. All threads call, and must meet afterwards.
template <int WARPS>
__device__ __forceinline__ void find_team(const AttentionParams& p, TeamSearch<WARPS>& plan) {
    if (p.num_splits == 1) {
        find_team_by_length(p, plan);
    } else if (threadIdx.x == 0) {
        const int head_tiles = num_head_tiles(p), item = int(blockIdx.x) / p.num_splits,
                  split = int(blockIdx.x) % p.num_splits;
        plan.team = {int(blockIdx.x) - split, p.num_splits, split, item / head_tiles, item % head_tiles};
    }
}

__device__ __forceinline__ int index_of(const Team& team) { return team.first + team.split; }

// The counter of a team's CTAs that have finished waiting. The team's first CTA sets it to 0 before it writes its
// partial result.
__device__ __forceinline__ unsigned* have_met(const AttentionParams& p, const Team& team) {
    return reinterpret_cast<unsigned*>(p.ready + gridDim.x + team.first);
}

// Says that this CTA has started. One thread calls.
__device__ __forceinline__ void join_team(const AttentionParams& p, const Team& team) {
    if (team.split == 0) *have_met(p, team) = 0;
    store_relaxed(p.ready + index_of(team), p.nonce + STARTED);
    __threadfence();  // orders this store before the loads of all_have_joined
}

// Whether all CTAs of the team have started. One warp calls, whose thread 0 has called join_team.
__device__ __forceinline__ bool all_have_joined(const AttentionParams& p, const Team& team, int lane) {
    uint64_t state = STARTED;
    if (lane < team.size) state = load_acquire(p.ready + team.first + lane) - p.nonce;
    return __all_sync(~0u, state - STARTED <= GONE - STARTED);
}

// Says that this CTA's partial result is written, and waits for the others if `all_joined`. Returns what this CTA
// merges. One warp calls, once it has met the threads that wrote the partial result. All threads that meet the warp
// afterwards may read the other partial results, if there is something to merge.
__device__ __forceinline__ Merging meet_team(const AttentionParams& p, const Team& team, bool all_joined, int lane,
                                             Waiting& waiting) {
    if (lane == 0) store_release(p.ready + index_of(team), p.nonce + (all_joined ? WAITS : GONE));
    if (!all_joined) return {0, 0};
    uint64_t state = WAITS;
    do {
        if (lane < team.size) state = load_acquire(p.ready + team.first + lane) - p.nonce;
    } while (__any_sync(~0u, state - WAITS > GONE - WAITS));
    const uint32_t waited = __ballot_sync(~0u, lane < team.size && state == WAITS);
    waiting.ctas = __popc(waited);
    if (lane == 0) waiting.before = atomicAdd(have_met(p, team), 1);
    if (waiting.ctas == team.size) return {team.split, team.size};
    return {0, __ffs(waited) - 1 == team.split};
}

// The last CTA that waited clears the words. Thread 0 calls, which was in the warp that called meet_team.
__device__ __forceinline__ void leave_team(const AttentionParams& p, const Team& team, const Waiting& waiting) {
    if (waiting.before + 1 != waiting.ctas) return;
#pragma unroll 1
    for (int i = 0; i < team.size; ++i) p.ready[team.first + i] = 0;
}

// --- the division ---------------------------------------------------------------------------------------------

template <int THREADS>
struct Teams : FromGrid {
    static constexpr End END = End::MEET;
    using Turn = TurnOf<INTERLEAVE_TILES>;
    static constexpr bool ONE_TURN = true, EQUAL_SPLITS = true, HAS_WAITED = true;
    struct State {
        TeamSearch<THREADS / 32> plan;
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
        const bool meets = results.is_first_warp();
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
