// Part of fp8_sm90: how the producer warps find and copy the rows that index lists name. Tiles without a valid entry
// are skipped.
#pragma once
#include "attention/division/list_end.cuh"
#include "attention/fp8_sm90/producer.cuh"

// How many slots of each cache an entry can name: an entry is valid if it is below that, as an unsigned number.
struct Slots {
    uint32_t main, extra;

    __device__ __forceinline__ explicit Slots(const AttentionParams& p)
        : main(nameable_slots(p.main)), extra(nameable_slots(p.extra)) {}
    __device__ __forceinline__ uint32_t of(const Work& w, int tile) const {
        return tile >= w.main_tiles ? extra : main;
    }
};

// As find_row of lists.cuh, but the cache is chosen once, which spills less here.
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

// The index lists of a query. This does what load_entry of turn.cuh does, with fewer instructions: they compete with
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

// Of each tile a producer warp loads all 64 entries, two a lane: those of rows row_of_lane(.., 0) and (.., 1). The
// entries i = 0 of the first 16 lanes belong to the rows that this warp copies.
__device__ __forceinline__ int row_of_lane(int warp, int lane, int i) {
    const int owner = (warp + lane / 16 + 2 * i) % 4;
    return STAGE_ROWS * stage_of_copier(lane % 16 / WARP_ROWS, owner) + owner % COPIERS * WARP_ROWS + lane % WARP_ROWS;
}

// Whether a tile has a valid entry. All lanes of the warp call.
__device__ __forceinline__ bool has_valid(const int32_t (&entries)[2], uint32_t slots) {
    return __any_sync(~0u, min(uint32_t(entries[0]), uint32_t(entries[1])) < slots);
}

// Finds the ends of the lists of the CTA's first turns, all at the same time. The eight consumer warps call while Q is
// copied. The turns are divided over the warps, so that two or more warps search each list.
__device__ __forceinline__ void find_first_ends(const AttentionParams& p, const Work& only) {
    static_assert(FIRST_TURNS == 4, "two warps look at a turn");
    Small& sm = small();
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, turns = min(num_turns(p), FIRST_TURNS);
    const int warps = turns <= 1 ? 8 : turns == 2 ? 4 : 2;  // that search for one turn
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

// The number of a split's tiles up to the end that WARPS warps have found. A warp calls.
template <int WARPS>
__device__ __forceinline__ int count_to_end(const Work& w, int lane, const int (&ends)[WARPS]) {
    const int tiles = __reduce_max_sync(~0u, ends[lane % WARPS]) - w.begin;
    return min(w.count(), INTERLEAVED ? ceil_div(max(tiles, 0), w.step) : max(tiles, 0));
}

// How many loads the producer warps have in flight while they search an end. Their registers are few.
constexpr int LOADS_OF_END = CONSUMERS_FIND_ENDS ? 4 : 2;

// Each of the four producer warps copies 16 rows of every tile that has a valid entry. A tile's entries are loaded
// AHEAD tiles before its rows, since under load that takes 2,000 cycles. Warp 0 also starts the turn: it copies Q and
// writes the TurnInfo. Returns the number of the stage after the split's last one.
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
    if (CONSUMERS_FIND_ENDS && w.turn >= FIRST_TURNS) find_count();
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
    bool ended = false;  // the last tile that was sent says that none follows
#pragma unroll 1
    for (int first = 0; first <= count; first += AHEAD) {
        const uint32_t stage_before = stage;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int n = first + i, tile = w.tile(n);
            if (n > count) break;
            const bool has_rows = has_valid(entries[i], slots.of(w, tile));  // false after the split's last tile
            const AnyRow row = row_of_entry(p, w, tile, entries[i][0], slots.of(w, tile));
            load_entries(i, n + AHEAD);
            // Takes the end that the consumers have found. Called once the first copies have started.
            auto adopt_end = [&] {
                if (!CONSUMERS_FIND_ENDS || i > 0 || n > 0 || w.turn >= FIRST_TURNS) return;
                mbarrier_wait(shared_address(&small().ends_known), 0);
                count = count_to_end(w, lane, small().first_ends[w.turn]);
            };
            // A tile without rows is skipped. But at the end of the split it is sent, unless the tile before has said
            // that none follows.
            if (!has_rows) {
                adopt_end();
                if (n < count || ended) continue;
            }
            // The consumers take tiles in units (UNIT_TILES). If the number of tiles is odd, an empty tile completes
            // the last unit.
            const bool completes = UNIT_TILES == 1 || (stage - w.stage) % UNIT_STAGES != 0;
            copy_tile(row, 1, tile >= w.main_tiles, stage, warp, lane, [&] {
                if (has_rows) adopt_end();
                const bool is_tile = n < count || (UNIT_TILES > 1 && completes);
                ended = completes && n + 1 >= count;
                const bool last_of_warpgroup = UNIT_TILES > 1 && completes ? ended : n + 2 >= count;
                return !is_tile ? ENDED : ended ? NONE : last_of_warpgroup ? ONE_AT_MOST : ANYTHING;
            });
            stage += TILE_STAGES;
        }
        const int next = first + AHEAD;
        // AHEAD tiles without rows, and nobody has looked for the split's end: it may be near, so find it now.
        if (!CONSUMERS_FIND_ENDS && stage == stage_before && next < count && count == w.count()) {
            find_count();
            count = max(count, next);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                load_entries(i, next + i);  // again, so that they need no registers during the search
        }
    }
    return stage;
}
