// The index lists of a query, in tiles of TILE_ROWS entries. The main list's tiles come first, then the extra list's.
//
// DENSE: there are no lists. A "query" is a request, and its main list stands for all rows that any of its query
// tokens sees.
#pragma once
#include "attention/dense.cuh"
#include "attention/params.cuh"
#include "rows/reader.cuh"

struct Lists {
    Query query;
    int main_length, extra_length, main_tiles;
#if DENSE
    int first_row;  // the first row of the request that a token sees
    int last_end;   // the end of the rows that the last token sees, even if the table has fewer
#endif
};

// Fills the lengths of a query's lists. Returns the number of tiles of both lists.
__device__ __forceinline__ int find_lists(const AttentionParams& p, Lists& w) {
#if DENSE
    const int last = dense(p).tokens - 1;
    w.last_end = length_of_request(dense(p), w.query.b);
    w.first_row = seen_of_length(dense(p), w.last_end, 0).begin;
    w.main_length = max(seen_of_length(dense(p), w.last_end, last).end - w.first_row, 0);
    w.extra_length = 0;
    w.main_tiles = uint32_t(w.main_length + uint32_t(TILE_ROWS - 1)) / TILE_ROWS;
    return w.main_tiles;
#endif
    w.main_length = list_length(p.main, w.query.b);
    w.extra_length = p.extra.topk == 0 ? 0 : list_length(p.extra, w.query.b);
    w.main_tiles = ceil_div(w.main_length, TILE_ROWS);
    return w.main_tiles + ceil_div(w.extra_length, TILE_ROWS);
}

__device__ __forceinline__ bool is_valid(const AttentionParams& p, const Lists& w, int tile, int32_t entry) {
    return entry >= 0 && entry < (tile >= w.main_tiles ? p.extra : p.main).num_slots;
}

__device__ __forceinline__ Row find_row(const AttentionParams& p, const Lists& w, int tile, int32_t entry) {
    return is_valid(p, w, tile, entry) ? Row::of_slot(tile >= w.main_tiles ? p.extra : p.main, entry) : Row::none();
}

// How many slots of a cache an int32_t entry can name. An entry is valid if it is below that, as an unsigned number.
__device__ __forceinline__ uint32_t nameable_slots(const Source& source) {
    return uint32_t(min(source.num_slots, int64_t(1) << 31));
}
