// Of fp8_sm90: the rows that index lists name. The producer warps pass over tiles without a valid entry.
#pragma once
#include "attention/division/list_end.cuh"
#include "attention/fp8_sm90/producer.cuh"

// The slots of both caches that entries can name.
struct Slots {
    uint32_t main, extra;

    __device__ __forceinline__ explicit Slots(const AttentionParams& p)
        : main(nameable_slots(p.main)), extra(nameable_slots(p.extra)) {}
    __device__ __forceinline__ uint32_t of(const Work& w, int tile) const {
        return tile >= w.main_tiles ? extra : main;
    }
};

// As find_row of lists.cuh, with the source chosen once. That spills less here.
#if EXTRA_ROWS
struct AnyRow {
    const uint8_t *data, *scale_bytes;

    template <typename Of>
    static __device__ __forceinline__ AnyRow from(const Of& row) {
        return {row.data, row.scales()};
    }
    __device__ __forceinline__ const uint8_t* scales() const { return scale_bytes; }
};
__device__ __forceinline__ AnyRow row_of_entry(const AttentionParams& p, const Work& w, int tile, int32_t entry,
                                               uint32_t slots) {
    if (uint32_t(entry) >= slots) return {nullptr, nullptr};
    if (tile >= w.main_tiles) return AnyRow::from(ExtraRow::of_slot(p.extra, entry));
    return AnyRow::from(Row::of_slot(p.main, entry));
}
#else
using AnyRow = Row;
__device__ __forceinline__ Row row_of_entry(const AttentionParams& p, const Work& w, int tile, int32_t entry,
                                            uint32_t slots) {
    return uint32_t(entry) < slots ? Row::of_slot(tile >= w.main_tiles ? p.extra : p.main, entry) : Row::none();
}
#endif

// The index lists of a query. As load_entry of turn.cuh, with as few instructions as possible: they take turns with
// wgmma.
struct Entries {
    const int32_t *main, *extra;

    __device__ __forceinline__ Entries(const AttentionParams& p, const Work& w)
        : main(list_of(p.main, w.query)), extra(list_of(p.extra, w.query) - w.main_tiles * TILE_ROWS) {}
    // The entry of a row of a tile, -1 where there is none.
    __device__ __forceinline__ int32_t of(const Work& w, int tile, int row) const {
        const bool second = tile >= w.main_tiles;
        const int at = tile * TILE_ROWS + row;
        int32_t entry = -1;
        if (tile < w.end && at < (second ? w.main_tiles * TILE_ROWS + w.extra_length : w.main_length))
            entry = (second ? extra : main)[at];
        return entry;
    }
};

// The rows of a tile of which lane `lane` of producer warp `warp` looks at the entries, i = 0, 1. The first 16 lanes'
// first ones are those that the warp copies.
__device__ __forceinline__ int row_of_lane(int warp, int lane, int i) {
    const int owner = (warp + lane / 16 + 2 * i) % 4;
    return STAGE_ROWS * stage_of_copier(lane % 16 / WARP_ROWS, owner) + owner % COPIERS * WARP_ROWS + lane % WARP_ROWS;
}

// Whether any of a tile's entries is valid. All lanes of the warp call.
__device__ __forceinline__ bool has_valid(const int32_t (&entries)[2], uint32_t slots) {
    return __any_sync(~0u, min(uint32_t(entries[0]), uint32_t(entries[1])) < slots);
}

// Finds the ends of the lists of the CTA's first turns, at once. The consumers call, while Q is on its way: the eight warps
// share the turns, two or more look at one.
__device__ __forceinline__ void find_first_ends(const AttentionParams& p, const Work& only) {
    static_assert(FIRST_TURNS == 4, "two warps look at a turn");
    Small& sm = small();
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, turns = min(num_turns(p), FIRST_TURNS);
    const int warps = turns <= 1 ? 8 : turns == 2 ? 4 : 2;  // of a turn
    const int turn = warp / warps, rank = warp % warps;
    if (turn < turns) {
        Lists lists;
        if constexpr (ONE_TURN) {
            lists = only;
        } else {
            lists.query = query_by_branch(p, Division::find_query(p, small().division, turn));
            find_lists(p, lists);
        }
        if (FOUND_EARLY) wait_for_earlier_kernels();
        const int end = find_end<8, true>(p, lists, 32 * rank + lane, 32 * warps);
        if (lane < 8 / warps) sm.first_ends[turn][rank + lane * warps] = end;
    }
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&sm.ends_known), lane);
}

// A split's tiles up to the end that WARPS warps have found. A warp calls.
template <int WARPS>
__device__ __forceinline__ int count_to_end(const Work& w, int lane, const int (&ends)[WARPS]) {
    const int tiles = __reduce_max_sync(~0u, ends[lane % WARPS]) - w.begin;
    return min(w.count(), IN_TURN ? ceil_div(max(tiles, 0), w.step) : max(tiles, 0));
}

// Loads at a time with which the producer warps find an end, as registers allow.
constexpr int LOADS_OF_END = CONSUMERS_LOOK ? 4 : 2;

// Each of the four producer warps copies 16 rows of every tile that has a valid entry. List entries are loaded AHEAD
// tiles before their rows: under load they take 2,000 cycles. Warp 0 also fetches Q in the meantime. Returns the stage
// behind the split.
__device__ __forceinline__ int copy_rows(const AttentionParams& p, const Work& w, int warp, int lane) {
    constexpr int AHEAD = 2;
    const Entries list(p, w);
    const Slots slots(p);
    int count = w.count();
    auto find_count = [&] {
        const int end = find_end<LOADS_OF_END, false>(p, w, 32 * warp + lane, WARPGROUP);
        if (lane == 0) small().ends[warp] = end;
        named_barrier_sync(PRODUCER_SYNC, WARPGROUP);
        count = count_to_end(w, lane, small().ends);
        named_barrier_sync(PRODUCER_SYNC, WARPGROUP);
    };
    if (CONSUMERS_LOOK && w.turn >= FIRST_TURNS) find_count();
    const int rows[2] = {row_of_lane(warp, lane, 0), row_of_lane(warp, lane, 1)};
    int32_t entries[AHEAD][2];
    auto load_entries = [&](int i, int n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) entries[i][j] = list.of(w, w.tile(n), rows[j]);
    };
    if (FOUND_EARLY && w.turn == 0) {
        wait_for_earlier_kernels();
        let_next_kernel_start();
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load_entries(i, i);
    if (warp == 0) begin_turn(p, w, lane);
    uint32_t stage = w.stage;
    bool ended = false;  // the consumers know that no tile follows
#pragma unroll 1
    for (int first = 0; first <= count; first += AHEAD) {
        const uint32_t stage_before = stage;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int n = first + i, tile = w.tile(n);
            if (n > count) break;
            const bool copied = has_valid(entries[i], slots.of(w, tile));  // behind the split there is no entry
            const AnyRow row = row_of_entry(p, w, tile, entries[i][0], slots.of(w, tile));
            load_entries(i, n + AHEAD);
            auto know_end = [&] {  // what the consumers have found, once the first copies are under way
                if (!CONSUMERS_LOOK || i > 0 || n > 0 || w.turn >= FIRST_TURNS) return;
                mbarrier_wait(shared_address(&small().ends_known), 0);
                count = count_to_end(w, lane, small().first_ends[w.turn]);
            };
            if (!copied) {
                know_end();
                if (n < count || ended) continue;
            }
            // The consumers take the tiles of a unit together: one without rows completes the last unit.
            const bool completes = UNIT_TILES == 1 || (stage - w.stage) % UNIT_STAGES != 0;
            copy_tile(row, 1, tile >= w.main_tiles, stage, warp, lane, [&] {
                if (copied) know_end();
                const bool is_tile = n < count || (UNIT_TILES > 1 && completes);
                ended = completes && n + 1 >= count;
                const bool last_of_warpgroup = UNIT_TILES > 1 && completes ? ended : n + 2 >= count;
                return !is_tile ? ENDED : ended ? NONE : last_of_warpgroup ? ONE_AT_MOST : ANYTHING;
            });
            stage += TILE_STAGES;
        }
        const int next = first + AHEAD;
        if (!CONSUMERS_LOOK && stage == stage_before && next < count && count == w.count()) {
            find_count();
            count = max(count, next);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) load_entries(i, next + i);  // again: meanwhile they need no registers
        }
    }
    return stage;
}
