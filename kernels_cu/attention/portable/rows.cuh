// Part of portable: how output warps look up and copy rows.
//
// An output warp copies WARP_ROWS rows of each tile. It looks up the addresses of its rows of LOOKUP_TILES tiles at
// once, a row a lane, and keeps them in shared memory. (Tile by tile, that chain of dependent instructions took longer
// than a tile's products.) Then it starts to load the list entries of the next LOOKUP_TILES tiles:
//
//   entries    list or block table -> a register of each lane, LOOKUP_TILES tiles before they are used
//   rows       entry -> address, in shared memory
//   copies     address -> stage, COPIED_BEFORE tiles before P.V
//
// EXTRA_ROWS: a tile has rows of one cache. `of_extra` says which one; copies and widening depend on it.
#pragma once
#if DENSE
#include "attention/portable/request_tiles.cuh"
#else
#include "attention/portable/list_tiles.cuh"
#endif
#include "ptx/mbarrier.cuh"

// Whether an output warp's rows of tile `n` of the split are the extra cache's, which has another layout.
__device__ __forceinline__ bool is_of_extra(int warp, int n) {
#if EXTRA_ROWS
    return small().of_extra[warp][n % VALID_TILES];
#else
    return false;
#endif
}

// Looks up the addresses of an output warp's rows of tiles `first` .. `first` + LOOKUP_TILES - 1 of the split, and
// which are valid. `entry`: the result of load_entries for these tiles.
__device__ __forceinline__ void look_up_rows(const AttentionParams& p, const WorkItem& w, int first, int32_t entry,
                                             bool skips) {
    const Role r = Role::here();
    Small& sm = small();
    const int i = r.lookup_tile(), row = r.lookup_row();
    const LookedUp found(p, w, first, r, entry, skips);
    __syncwarp();
    if (i < LOOKUP_TILES) {
        sm.rows[i][row] = found.row;
        sm.valid[(first + i) % VALID_TILES][row] = found.row.data != nullptr;
#if EXTRA_ROWS
        if (r.lane % WARP_ROWS == 0) sm.of_extra[r.warp][(first + i) % VALID_TILES] = found.tile >= w.main_tiles;
#endif
    }
    __syncwarp();
}

// The same. Then starts to load the entries of the next tiles, and returns them.
__device__ __forceinline__ int32_t look_up_and_load(const AttentionParams& p, const WorkItem& w, int first,
                                                    int32_t entry, bool skips) {
    look_up_rows(p, w, first, entry, skips);
    return load_entries(p, w, first + LOOKUP_TILES, skips);
}

// Looks up the first tiles of a split again, once it is known which tiles are skipped. Returns the entries of the next
// tiles.
__device__ __forceinline__ int32_t look_up_marked(const AttentionParams& p, const WorkItem& w) {
    int32_t entry = -1;
#pragma unroll 1
    for (int first = 0; first <= LOOKUP_TILES; first += LOOKUP_TILES) {
        if (first > 0) look_up_rows(p, w, 0, entry, true);
        entry = load_entries(p, w, first, true);
    }
    return entry;
}

// Starts copies of an output warp's rows of tile `n` of the split: QUANTIZED to raw stage `stage`, else to stage
// `stage`.
__device__ __forceinline__ void copy_rows(const AttentionParams& p, int n, int stage) {
    const Role r = Role::here();
    const int row = r.lane / 8;  // eight lanes copy a row
    if (WARP_ROWS < ROWS_AT_ONCE && row >= WARP_ROWS) return;
    const FoundRow from = small().rows[n % LOOKUP_TILES][r.warp * WARP_ROWS + row];
#if EXTRA_ROWS
    const uint32_t to = raw_rows(r.warp, stage) + row * Row::STAGED_BYTES;
    if (is_of_extra(r.warp, n)) {
        copy_quantized<EXTRA_ROW_STRIDE, ExtraRow::SCALES_BEHIND>(to, from.data, from.scale_bytes, r.lane);
    } else {
        copy_quantized<ROW_STRIDE, Row::SCALES_BEHIND>(to, from.data, from.scale_bytes, r.lane);
    }
#else
    if constexpr (QUANTIZED) {
        copy_to_stage(from, raw_rows(r.warp, stage), row, r.lane, true);
    } else {
        copy_to_stage(from, stage_address(stage), r.warp * WARP_ROWS + row, r.lane, p.flags & ALIGNED_ROWS);
    }
#endif
}

// Not QUANTIZED: starts copies of an output warp's rows of a tile; the stage's barrier waits for them.
__device__ __forceinline__ void copy_tile(const AttentionParams& p, int n, int stage) {
    copy_rows(p, n, stage);
    const uint32_t full = shared_address(&small().tile_full[stage]);
    if (p.flags & ALIGNED_ROWS) {
        mbarrier_arrive_after_copies(full);
    } else {
        mbarrier_arrive(full);
    }
}
