// Part of portable: the tiles of a query's index lists. Tiles without a valid entry are skipped.
//
//   tile of the split    0  1  2  3  4  5  6  7
//   has a valid entry    x  x  -  -  x  -  x  -      tiles 0, 1, 4, 6 are marked; the loops count them as 0 .. 3
//
// While the first rows of a split are copied, the score warps scan all its entries and mark the tiles with a valid
// one. The main loops do not see this: they count marked tiles only. Output warps find out which tile that is when
// they load list entries, once in LOOKUP_TILES tiles. Only the first MARKED_TILES tiles of a split have a mark, since
// more do not fit. Later tiles are worked on up to the last one with a valid entry.
//
// The copies that start before the scan ends are those of the split's first COPIED_BEFORE tiles. If one of these is to
// be skipped, and a marked tile follows, the split is restarted: all warps leave it and take it again, and now the
// first marked tiles are copied. The tiles that were copied in vain stay in their stages, which count as used.
#pragma once
#include "attention/portable/splits.cuh"
#include "ptx/mbarrier.cuh"

using Params = AttentionParams;

// The query token and the head of a work item's line, which is a head of its query.
__device__ __forceinline__ const Query& query_at(const AttentionParams&, const Query& query, int) { return query; }
__device__ __forceinline__ const int& head_at(const AttentionParams&, const int& line) { return line; }

// Every head sees every valid row, so there is nothing to mask.
template <typename Scores>
__device__ __forceinline__ void mask_unseen(const AttentionParams&, int, Scores&) {}

// --- marks --------------------------------------------------------------------------------------------------------

// Word `lane` of a split's marks, 32 tiles.
__device__ __forceinline__ uint32_t marks_of(const Split& w, int lane) {
    return 32 * lane < w.end - w.begin ? reinterpret_cast<const uint32_t*>(small().marks)[lane] : 0;
}

// How many of a split's first `end` tiles are worked on: those that are marked, and all that have no mark. A warp
// calls.
__device__ __forceinline__ int count_marked(const Split& w, int end) {
    const int lane = Role::here().lane, left = end - 32 * lane;
    const uint32_t marks = left <= 0 ? 0 : left < 32 ? marks_of(w, lane) & ((1u << left) - 1) : marks_of(w, lane);
    return __reduce_add_sync(~0u, __popc(marks)) + max(end - MARKED_TILES, 0);
}

// The split's tile that is its marked tile number `n`; a tile behind the split if it has fewer. A warp calls.
__device__ __forceinline__ int find_marked(const Split& w, int n) {
    const int lane = Role::here().lane;
    const uint32_t marks = marks_of(w, lane);
    const int up_to = inclusive_sum(__popc(marks), lane), before = up_to - __popc(marks);
    const int behind = n - __shfl_sync(~0u, up_to, 31);
    int word = 0, bit = 0;
#pragma unroll 1
    for (int step = 16; step > 0; step /= 2) {
        if (__shfl_sync(~0u, before, word + step) <= n) word += step;
    }
    const uint32_t bits = __shfl_sync(~0u, marks, word);
    n -= __shfl_sync(~0u, before, word);
#pragma unroll 1
    for (int step = 16; step > 0; step /= 2) {
        const int count = __popc(bits >> bit & ((1 << step) - 1));
        if (count <= n) bit += step, n -= count;
    }
    return behind < 0 ? 32 * word + bit : MARKED_TILES + behind;
}

// --- rows of tiles, for output warps ------------------------------------------------------------------------------

// Loads a lane's list entry, of a row in one of tiles `first` .. of the split; -1 where there is none. `skips`: tiles
// are counted among the marked ones.
__device__ __forceinline__ int32_t load_entries(const AttentionParams& p, const WorkItem& w, int first, bool skips) {
    const Role r = Role::here();
    const int n = first + r.lookup_tile();
    return load_entry(p, w, w.begin + (skips ? find_marked(w, n) : n), r.lookup_row());
}

// The row of a tile that its list entry names.
__device__ __forceinline__ FoundRow row_of_entry(const AttentionParams& p, const WorkItem& w, int tile,
                                                 int32_t entry) {
#if EXTRA_ROWS
    if (!is_valid(p, w, tile, entry)) return {nullptr, nullptr};
    if (tile < w.main_tiles) {
        const Row row = Row::of_slot(p.main, entry);
        return {row.data, row.scales()};
    }
    const ExtraRow row = ExtraRow::of_slot(p.extra, entry);
    return {row.data, row.scales()};
#else
    return find_row(p, w, tile, entry);
#endif
}

// The row that a lane looks up by its entry from load_entries. `tile` is a tile of the same list as the row's own.
struct LookedUp {
    int tile;
    FoundRow row;

    __device__ __forceinline__ LookedUp(const AttentionParams& p, const WorkItem& w, int first, const Role& r,
                                        int32_t entry, bool skips)
        : tile((skips ? small().first_marked : w.begin) + first + r.lookup_tile()),
          row(row_of_entry(p, w, tile, entry)) {}
};

// --- the scan, by score warps -------------------------------------------------------------------------------------

using Entries = int32_t[SCANNED];

// The index of a lane's first entry in tiles `first` .. of a split, as if both lists were one and filled up to whole
// tiles.
__device__ __forceinline__ int first_scanned(const WorkItem& w, int first) {
    return (w.begin + first) * TILE_ROWS + Role::here().lane;
}

// Loads the entries of tiles `first` .. of a split; -1 where there are none.
__device__ __forceinline__ void load_scanned(const AttentionParams& p, const WorkItem& w, int first,
                                             Entries& entries) {
#pragma unroll
    for (int32_t& entry : entries) entry = -1;
    if (w.end - w.begin <= first) return;
    const int row = first_scanned(w, first), main_rows = w.main_tiles * TILE_ROWS, end = w.end * TILE_ROWS;
    const int32_t* main = list_of(p.main, w.query) + row;
    const int left = min(w.main_length, end) - row;
#pragma unroll
    for (int i = 0; i < SCANNED; ++i) {
        if (32 * i < left) entries[i] = main[32 * i];
    }
    if (w.end <= w.main_tiles) return;
    const int32_t* extra = list_of(p.extra, w.query) + row - main_rows;
    const int before = main_rows - row, extra_left = min(w.extra_length + main_rows, end) - row;
#pragma unroll
    for (int i = 0; i < SCANNED; ++i) {
        if (32 * i >= before && 32 * i < extra_left) entries[i] = extra[32 * i];
    }
}

// Which of the tiles `first` .. have a valid entry, a bit each. `entries`: from load_scanned. A warp calls.
__device__ __forceinline__ uint32_t find_valid(const AttentionParams& p, const WorkItem& w, int first,
                                               const Entries& entries) {
    const int main_left = w.main_tiles * TILE_ROWS - first_scanned(w, first);
    const uint32_t main_slots = nameable_slots(p.main), extra_slots = nameable_slots(p.extra);
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < SCANNED; ++i) {
        if (uint32_t(entries[i]) < (32 * i < main_left ? main_slots : extra_slots)) mine |= 1u << i * TILES_OF_LOAD;
    }
    return __reduce_or_sync(~0u, mine << Role::here().lane / TILE_ROWS);
}

// Which of the SCANNED_TILES tiles `first` .. of a split have a valid entry, a bit each. A warp calls.
__device__ __forceinline__ uint32_t scan_tiles(const AttentionParams& p, const WorkItem& w, int first) {
    Entries entries;
    load_scanned(p, w, first, entries);
    return find_valid(p, w, first, entries);
}

// Marks tiles `first` .. of the split. Returns the number of tiles up to the last marked one. A warp calls.
__device__ __forceinline__ int mark_tiles(int first, uint32_t marks) {
    const int lane = Role::here().lane;
    if (first < MARKED_TILES && lane < SCANNED_TILES / 8) small().marks[first / 8 + lane] = marks >> 8 * lane;
    return marks == 0 ? 0 : first + 32 - __clz(marks);
}

// Waits for the tiles whose copies started at the split's begin.
__device__ __forceinline__ void wait_for_first_tiles(int count) {
    int stage = small().stage, phase = small().phase;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
        mbarrier_wait(shared_address(&small().tile_full[stage]), phase);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}

// Finds which tiles of this split are worked on, and returns their number; -1 if the split is restarted. `valid`: the
// result of scan_tiles for this warp's first tiles. Score warps call.
//
// Tiles that were copied in vain are waited for here: if the split is restarted, or if fewer tiles are worked on than
// were copied. Once TILES_KNOWN is passed, new copies to their stages may start.
__device__ __forceinline__ int find_tiles(const AttentionParams& p, uint32_t valid) {
    constexpr int ROUND = SCORE_WARPS * SCANNED_TILES;
    static_assert(MARKED_TILES % ROUND == 0 && ROUND % 32 == 0, "");
    const Role r = Role::here();
    Small& sm = small();
    const WorkItem& w = sm.work;
    const int all = w.end - w.begin;
    int end = 0;
#pragma unroll 1
    for (int begin = 0; begin < all; begin += ROUND) {
        const int first = begin + r.warp * SCANNED_TILES;
        if (begin > 0) valid = scan_tiles(p, w, first);
        end = max(end, mark_tiles(first, valid));
    }
    if (r.lane == 0) sm.ends[r.warp] = end;
    named_barrier_sync(SCORE_SYNC, SCORE_THREADS);
    end = max(max(sm.ends[0], sm.ends[1]), max(sm.ends[2], sm.ends[3]));
    const int tiles = count_marked(w, end), main_tiles = count_marked(w, w.main_tiles - w.begin);
    const int staged = min(sm.expected, STAGED_BEFORE);
    const bool restarts = !sm.restarted && ~sm.marks[0] & ((1 << min(tiles, COPIED_BEFORE)) - 1);
    if (restarts || tiles < staged) wait_for_first_tiles(staged);
    if (r.warp == 0 && r.lane == 0) {
        sm.tiles = tiles;
        sm.skips = tiles < end;
        sm.first_marked = w.main_tiles - main_tiles;
        sm.restarts = restarts;
        const uint32_t behind = sm.stage + (restarts ? staged : max(tiles, staged));
        sm.next_stage = behind % STAGES;
        sm.next_phase = sm.phase ^ (behind / STAGES & 1);
    }
    return restarts ? -1 : uniform(tiles);
}
