// Part of portable, dense attention: the tiles of a request, whose rows the block table names. A work item's lines are
// query tokens times heads of the request, which share its rows. All tiles are worked on. In a tile that some token
// does not see in full, logits of rows that a line does not see become -inf.
#pragma once
#include "attention/portable/splits.cuh"

using Params = DenseParams;

// The query token and the head of a request's line.
__device__ __forceinline__ int token_of(const AttentionParams& p, int line) { return divide(line, dense(p).heads); }
__device__ __forceinline__ Query query_at(const AttentionParams& p, const Query& request, int line) {
    return {request.index, request.b, token_of(p, line)};
}
__device__ __forceinline__ int head_at(const AttentionParams& p, int line) {
    return line - token_of(p, line) * int(dense(p).heads.value);
}

// Loads the block that holds a lane's row, in one of tiles `first` .. of the split; -1 where there is none.
__device__ __forceinline__ int32_t load_entries(const AttentionParams& p, const WorkItem& w, int first, bool) {
    const Role r = Role::here();
    const int n = first + r.lookup_tile(), tile = w.begin + n, at = tile * TILE_ROWS + r.lookup_row();
    if (tile >= w.end || at >= w.main_length) return -1;
    return load_block(dense(p), w.query.b, w.first_row + at);
}

// The row that a lane looks up, by its block from load_entries.
struct LookedUp {
    Row row;

    __device__ __forceinline__ LookedUp(const AttentionParams& p, const WorkItem& w, int first, const Role& r,
                                        int32_t block, bool)
        : row(row_in_block<Row>(dense(p), block,
                                w.first_row + (w.begin + first + r.lookup_tile()) * TILE_ROWS + r.lookup_row())) {}
};

// There is nothing to scan.
__device__ __forceinline__ uint32_t scan_tiles(const AttentionParams&, const WorkItem&, int) { return 0; }

// Finds how many tiles of this split are worked on: all. Score warps call.
__device__ __forceinline__ int find_tiles(const AttentionParams&, uint32_t) {
    const Role r = Role::here();
    Small& sm = small();
    const int all = sm.work.end - sm.work.begin;
    if (r.warp == 0 && r.lane == 0) {
        sm.tiles = all;
        sm.skips = sm.restarts = false;
        sm.next_stage = (sm.stage + uint32_t(all)) % STAGES;
        sm.next_phase = sm.phase ^ ((sm.stage + uint32_t(all)) / STAGES & 1);
    }
    return uniform(all);
}

// Masks S of a score thread where its lines do not see a row of the split's tile `tile`.
template <typename Scores>
__device__ __forceinline__ void mask_unseen(const AttentionParams& params, int tile, Scores& s) {
    const DenseParams& p = dense(params);
    const WorkItem& w = small().work;
    const int least_end = w.last_end - (p.causal ? p.tokens - 1 : 0);  // of the first token
    const int first = w.first_row + (w.begin + tile) * TILE_ROWS;
    const bool whole = first <= least_end - TILE_ROWS && (p.window == 0 || first >= w.last_end - p.window);
    if (whole || p.tokens == 1) return;
    const Role r = Role::here();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int line = first_head() + 16 * r.own_tile() + r.g + 8 * i;
        const Seen seen = seen_of_length(p, w.last_end, token_of(p, line));
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int row = first + 8 * n + 2 * r.t + j;
                if (row < seen.begin || row >= seen.end) s[n][2 * i + j] = -INF;
            }
        }
    }
}
