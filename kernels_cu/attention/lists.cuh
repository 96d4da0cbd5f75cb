// Rows by their place in a query's index lists, in tiles of TILE_ROWS entries: those of the main list, then of the extra one.
//
// `W` is what a kernel knows of a piece of work: its query, the lengths of both lists (main_length, extra_length), the main
// list's tiles (main_tiles), and the tile at which it ends (end).
#pragma once
#include "attention/params.cuh"
#include "rows/reader.cuh"

// Whether lengths are read from memory, where the launch before may have written them.
__device__ __forceinline__ bool has_lengths(const AttentionParams& p) { return p.main.lengths != nullptr || p.extra.lengths != nullptr; }

// The lists' lengths, of the query that `w` has by now. Returns the tiles of both.
template <typename W>
__device__ __forceinline__ int find_lists(const AttentionParams& p, W& w) {
    w.main_length = list_length(p.main, w.query.b);
    w.extra_length = p.extra.topk == 0 ? 0 : list_length(p.extra, w.query.b);
    w.main_tiles = ceil_div(w.main_length, TILE_ROWS);
    return w.main_tiles + ceil_div(w.extra_length, TILE_ROWS);
}

// The tiles begin .. end - 1 that split `split` of them has: the first few have one more than others.
template <typename W>
__device__ __forceinline__ void find_tiles(const AttentionParams& p, W& w, uint32_t split, uint32_t splits) {
    const uint32_t tiles = find_lists(p, w), each = tiles / splits, more = tiles % splits;
    w.begin = split * each + min(split, more);
    w.end = w.begin + each + (split < more);
}

__device__ __forceinline__ const int32_t* list_of(const Source& source, Query query) {
    return source.indices + query.b * source.index_stride_b + query.s * source.index_stride_s;
}

// The entry of the index list for row `row` of a tile, -1 where there is none. It is not looked at here, so that nobody
// waits for it before it is used.
template <typename W>
__device__ __forceinline__ int32_t load_entry(const AttentionParams& p, const W& w, int tile, int row) {
    const bool extra = tile >= w.main_tiles;
    const Source& source = extra ? p.extra : p.main;
    const int at = (extra ? tile - w.main_tiles : tile) * TILE_ROWS + row;
    const bool here = tile < w.end && at < (extra ? w.extra_length : w.main_length);
    const int32_t* list = list_of(source, w.query);
    int32_t entry = -1;
    if (here) entry = list[at];
    return entry;
}

template <typename W>
__device__ __forceinline__ bool is_valid(const AttentionParams& p, const W& w, int tile, int32_t entry) {
    return entry >= 0 && entry < (tile >= w.main_tiles ? p.extra : p.main).num_slots;
}

template <typename W>
__device__ __forceinline__ Rows find_row(const AttentionParams& p, const W& w, int tile, int32_t entry) {
    return is_valid(p, w, tile, entry) ? Rows::row_of(tile >= w.main_tiles ? p.extra : p.main, entry) : Rows::none();
}
