// Part of bf16_few_heads_sm90: finds where a warpgroup's tiles end.
//
// Tiles after the last one with a valid entry need not be looked at. The consumers and the producers of a warpgroup
// both find that last tile, each for themselves.
#pragma once
#include "attention/bf16_few_heads_sm90/plan.cuh"

// This warpgroup's last tile of a work item, if it has any.
__device__ __forceinline__ int last_tile(const Work& w) {
    return w.begin + max((w.end - 1 - w.begin) / w.step, 0) * w.step;
}

// Loads the entry of the last tile that a thread passes to find_end.
__device__ __forceinline__ int32_t load_last_entry(const AttentionParams& p, const Work& w) {
    return load_entry(p, w, last_tile(w), threadIdx.x % TILE_ROWS);
}

// Finds where this warpgroup's tiles end: after the last one with a valid entry. If it has tiles, at least one
// remains. The 128 threads of a named barrier search together: 64 look at one tile, 64 at the next.
__device__ __forceinline__ int find_end(const AttentionParams& p, const Work& w, int barrier, int32_t last_entry) {
    constexpr int AT_ONCE = 4;  // loads that a thread has in flight
    int from = last_tile(w);
    if (any(barrier, is_valid(p, w, from, last_entry))) return w.end;
    const int row = threadIdx.x % TILE_ROWS, mine = threadIdx.x / TILE_ROWS % 2;
#pragma unroll 1
    for (from -= w.step; from > w.begin; from -= 2 * AT_ONCE * w.step) {
        auto tile = [&](int pair, int i) { return max(from - (2 * pair + i) * w.step, w.begin); };
        int32_t entries[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) entries[i] = load_entry(p, w, tile(i, mine), row);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const bool valid = is_valid(p, w, tile(i, mine), entries[i]);
            if (any(barrier, valid)) return tile(i, any(barrier, valid && mine == 0) ? 0 : 1) + 1;
        }
    }
    return min(w.end, w.begin + 1);
}

// Whether a tile is this warpgroup's last one.
__device__ __forceinline__ bool is_last(const Work& w, int tile) { return tile + w.step >= w.end; }
