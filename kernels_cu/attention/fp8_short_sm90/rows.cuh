// Part of fp8_short_sm90: the rows of a CTA. Each warp copies the 16 rows of its S^T.
#pragma once
#include "attention/fp8_short_sm90/plan.cuh"

// The cache of a tile, and the index of the tile's first entry in its list. Warpgroup w has tile w; the first tile
// counts as existing in any case.
struct Place {
    const Source& source;
    int first;
    bool exists;
};
__device__ __forceinline__ Place place_of_tile(const AttentionParams& p, int tile) {
    const int of_extra = tile - ceil_div(p.main.topk, TILE_ROWS);
    const Source& source = of_extra < 0 ? p.main : p.extra;
    const int first = (of_extra < 0 ? tile : of_extra) * TILE_ROWS;
    return {source, first, tile == 0 || first < source.topk};
}

// The entry of this lane's row, and the length of its list. Neither is used while they are loaded, so that nothing
// waits for them before Q is loaded. Lane l < 16 has row l of its warp.
struct Entry {
    int32_t slot, length, at;
    __device__ __forceinline__ bool is_listed() const { return at < length; }
};
__device__ __forceinline__ Entry load_entry(const AttentionParams& p, const Query& query, const Role& r) {
    const Place place = place_of_tile(p, r.warpgroup);
    const Source& source = place.source;
    Entry entry = {-1, source.topk, place.first + STAGE_ROWS * r.warp + r.lane};
    if (r.lane < STAGE_ROWS && entry.at < source.topk) {
        entry.slot = list_of(source, query)[entry.at];
        if (source.lengths != nullptr) entry.length = source.lengths[query.b];
    }
    return entry;
}

__device__ __forceinline__ uint32_t rows_of_warp(const Role& r) {
    return shared_address(shared) + ROWS_AT + STAGE_ROWS * (4 * r.warpgroup + r.warp) * STRIDE;
}

// Starts the copies of a warp's rows; of zeros, where an entry is not valid.
__device__ __forceinline__ void copy_rows(const AttentionParams& p, const Entry& entry, const Role& r) {
    const Place place = place_of_tile(p, r.warpgroup);
    const int warp = 4 * r.warpgroup + r.warp;
    const uint32_t full = shared_address(&rest().full[warp]), to = rows_of_warp(r) + r.lane * STRIDE;
    const bool named = entry.is_listed() && uint32_t(entry.slot) < nameable_slots(place.source);
    const Row row = named ? Row::of_slot(place.source, entry.slot) : Row::none();
    const uint32_t valid = __ballot_sync(~0u, row.data != nullptr);
    if (r.lane == 0) rest().valid[warp] = valid;
    if (!place.exists) return;
    mbarrier_arrive_expecting_for_warp(full, STAGE_ROWS * ROW_STRIDE, r.lane);
    __syncwarp();
    if (r.lane < STAGE_ROWS) {
        copy_in_bulk(to, row_or_zeros<ROW_STRIDE>(row.data, r.lane), ROW_STRIDE, full);
        copy_scales<SCALES_BEHIND>(to + SCALES_AT, row.scales(), row.data != nullptr);
    }
    mbarrier_arrive_after_copies(full);
}

// Which tiles are multiplied, a bit each: those with a valid entry; the first one if there is none. All lanes of a
// warp call.
__device__ __forceinline__ uint32_t tiles_with_rows() {
    const uint32_t warps = __ballot_sync(~0u, rest().valid[threadIdx.x % WARPS] != 0);
    uint32_t tiles = 0;
#pragma unroll
    for (int i = 0; i < TILES; ++i) tiles |= uint32_t((warps >> 4 * i & 15) != 0) << i;
    return max(tiles, 1u);
}
