// Work items: a query, a tile of its heads, and a split of its rows, which come in tiles of TILE_ROWS list entries:
// those of the main list, then those of the extra list.
#pragma once
#include "attention/params.cuh"
#include "rows/reader.cuh"

__device__ __forceinline__ int num_head_tiles(const AttentionParams& p) { return ceil_div(p.h_q, HEADS); }

// The index lists of a query. The main list's tiles come first.
struct Lists {
    Query query;
    int main_length, extra_length, main_tiles;
};

// A split of them: tiles begin .. end - 1.
struct Split : Lists {
    int begin, end;
};

struct WorkItem : Split {
    int first_head;
};

// Fills the lengths of a query's lists. Returns the tiles of both.
__device__ __forceinline__ int find_lists(const AttentionParams& p, Lists& w) {
    w.main_length = list_length(p.main, w.query.b);
    w.extra_length = p.extra.topk == 0 ? 0 : list_length(p.extra, w.query.b);
    w.main_tiles = ceil_div(w.main_length, TILE_ROWS);
    return w.main_tiles + ceil_div(w.extra_length, TILE_ROWS);
}

// Split `split` of `splits`. The first few have a tile more than the others.
__device__ __forceinline__ void find_item(const AttentionParams& p, WorkItem& w, int query, int head_tile,
                                          uint32_t split, uint32_t splits) {
    w.query = query_by_branch(p, query);
    w.first_head = head_tile * HEADS;
    const uint32_t tiles = find_lists(p, w), each = tiles / splits, more = tiles % splits;
    w.begin = split * each + min(split, more);
    w.end = w.begin + each + (split < more);
}

// The list entry of row `row` of a tile, -1 where there is none. The entry is not looked at here, so that nothing
// waits for it before it is used.
__device__ __forceinline__ int32_t load_entry(const AttentionParams& p, const Split& w, int tile, int row) {
    const bool extra = tile >= w.main_tiles;
    const Source& source = extra ? p.extra : p.main;
    const int at = (extra ? tile - w.main_tiles : tile) * TILE_ROWS + row;
    const bool listed = tile < w.end && at < (extra ? w.extra_length : w.main_length);
    const int32_t* list = list_of(source, w.query);
    int32_t entry = -1;
    if (listed) entry = list[at];
    return entry;
}

__device__ __forceinline__ bool is_valid(const AttentionParams& p, const Lists& w, int tile, int32_t entry) {
    return entry >= 0 && entry < (tile >= w.main_tiles ? p.extra : p.main).num_slots;
}

__device__ __forceinline__ Row find_row(const AttentionParams& p, const Lists& w, int tile, int32_t entry) {
    return is_valid(p, w, tile, entry) ? Row::of_slot(tile >= w.main_tiles ? p.extra : p.main, entry) : Row::none();
}

// --- persistent CTAs ------------------------------------------------------------------------------------------

// Deals `total()` items out to workers (CTAs or warpgroups) and calls `act` with what `find(item)` returns for each of
// this worker's items, unless that is negative: nothing to do. All lanes of the warp call.
//
// The direction changes from round to round: if items are ordered by length, no worker gets the longest item of every
// round. The lanes of a warp look 32 items up at once: to wait for memory at each item would cost 1 us of about 30.
template <typename Total, typename Workers, typename Find, typename Act>
__device__ __forceinline__ void for_each_item(Total total, int worker, Workers workers, Find find, Act act) {
#pragma unroll 1
    for (int n = 0; n * workers() < total(); n += 32) {
        const int lane = threadIdx.x % 32;
        const int item = (n + lane) * workers() + (lane % 2 == 0 ? worker : workers() - 1 - worker);
        int mine = item < total() ? find(item) : -1;
#pragma unroll 1
        while (const uint32_t left = __ballot_sync(~0u, mine >= 0)) {
            const int first = __ffs(left) - 1, found = __shfl_sync(~0u, mine, first);
            if (threadIdx.x % 32 == first) mine = -1;
            act(found);
        }
    }
}

// Whether a query has its results already.
__device__ __forceinline__ bool has_results(const AttentionParams& p, int query) {
    return p.flags & SOME_DONE && p.main.lengths[query / p.s_q] < 0;
}

// For for_each_item: query * head_tiles + head tile of an item, in the call's order; -1 if the query has its results.
__device__ __forceinline__ int find_head_tile(const AttentionParams& p, int item, int head_tiles) {
    const int n = item / head_tiles, query = p.order == nullptr ? n : p.order[n];
    return has_results(p, query) ? -1 : query * head_tiles + item % head_tiles;
}
