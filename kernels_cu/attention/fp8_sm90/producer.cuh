// Part of fp8_sm90: how the producer warps copy a tile's rows, and Q.
#pragma once
#if DENSE
#include "attention/fp8_sm90/request_lines.cuh"
#else
#include "attention/fp8_sm90/list_lines.cuh"
#endif
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/bulk_row.cuh"

// Producer warp `warp` copies rows of COPIERS stages of each tile. Returns the number in the tile of the i-th of them.
__device__ __forceinline__ int stage_of_copier(int i, int warp) { return COPIERS == 1 ? warp : i; }

// Copies the scales of a row that are stored apart from it.
template <int BYTES>
__device__ __forceinline__ void copy_scales(uint32_t to, const uint8_t* from, bool valid) {
    if (BYTES == 8) cp_async_8(to, from, valid);
    if (BYTES >= 16) cp_async_16(to, from, valid);
    if (BYTES == 32) cp_async_16(to + 16, from + 16, valid);
}

// Starts the copies of a producer warp's 16 rows of the tile that begins with stage `first`. Lane l < 16 holds row l %
// WARP_ROWS of those in the warp's stage number l / WARP_ROWS.
//   run         consecutive rows that this lane copies at once; 0 if a lane before copies its row
//   of_extra    FP4_EXTRA: the rows are the extra cache's
//   follows()   what follows the tile; called once copies have started
template <typename AnyRow, typename Act>
__device__ __forceinline__ void copy_tile(const AnyRow& row, int run, bool of_extra, uint32_t first, int warp,
                                          int lane, Act follows) {
    const bool other = FP4_EXTRA && of_extra;
    const int at = other ? EXTRA_COPIED_AT : COPIED_AT, bytes = other ? EXTRA_STRIDE : ROW_STRIDE;
    Small& sm = small();
    const uint32_t valid = __ballot_sync(~0u, row.data != nullptr);
    uint32_t next;
#pragma unroll
    for (int i = 0; i < COPIERS; ++i) {
        const uint32_t stage = first + stage_of_copier(i, warp);
        const int place = place_of(stage);
        const uint32_t to = stage_address(stage) + warp % COPIERS * WARP_ROWS * STRIDE;
        const uint32_t full = shared_address(&sm.full[place]);
        mbarrier_wait(shared_address(&sm.empty[place]), phase_of(stage) ^ 1);
        if (stage >= STAGES) fence_proxy_async();  // orders reads of the stage before bulk copies into it
        if (lane / WARP_ROWS == i) {
            const uint32_t own = to + row_offset(lane % WARP_ROWS);
            if (run > 0) copy_in_bulk(own + at, row_or_zeros<ROW_STRIDE>(row.data, lane), run * bytes, full);
            if (other) {
                copy_scales<EXTRA_SCALES_BEHIND>(own + SCALES_AT, row.scales(), row.data != nullptr);
            } else {
                copy_scales<SCALES_BEHIND>(own + SCALES_AT, row.scales(), row.data != nullptr);
            }
        }
        __syncwarp();
        if (i == 0) next = follows();
        const uint32_t valid_here = valid >> WARP_ROWS * i & (1 << WARP_ROWS) - 1;
        if (lane == 0) store_marks(place, warp % COPIERS, valid_here | next | (other ? EXTRA_TILE : 0));
        mbarrier_arrive_expecting_for_warp(full, WARP_ROWS * bytes, lane);
        if (COPY_SCALES) mbarrier_arrive_after_copies(full);
    }
}

// Where a head of Q, of `bytes` bytes, is copied to.
__device__ __forceinline__ uint32_t raw_q(int head, int bytes) {
    return shared_address(shared) + Q_AT + head * bytes + head / GROUP_HEADS * GROUP_GAP;
}

// Starts bulk copies of Q into its space, where load_q will store it again in the order of multiply_qk. One warp
// calls.
__device__ __forceinline__ void copy_q(const AttentionParams& p, const Query& query, int first_head, int lane) {
    const FirstQ q = first_q(p, query, first_head);
    const uint32_t full = shared_address(&small().q_full);
    const int heads = min(HEADS, p.h_q - first_head), bytes = bytes_of_q(p);
    const int each = contiguous_lines(p);  // heads that one copy brings
    if (lane == 0) mbarrier_arrive_expecting(full, heads * bytes);
    __syncwarp();
    for (int head = lane * each; head < heads; head += 32 * each)
        copy_in_bulk(raw_q(head, bytes), further_q(p, q, head), min(each, heads - head) * bytes, full);
}

// Starts copies of a turn's Q, once the turn before has released its own. Only the first split of an item needs them:
// later ones find Q there.
__device__ __forceinline__ void fetch_q(const AttentionParams& p, const Work& w, int lane) {
    if (w.turn > 0) mbarrier_wait(shared_address(&small().q_empty), (w.turn - 1) & 1);
    if (Division::split_of(p, w.turn) > 0) {
        if (lane == 0) mbarrier_arrive(shared_address(&small().q_full));
        return;
    }
    copy_q(p, w.query, w.first_head, lane);
}

// Starts a turn: copies of its Q, and its TurnInfo for the consumers. One warp calls.
__device__ __forceinline__ void begin_turn(const AttentionParams& p, const Work& w, int lane) {
    if (END != End::KEEP || w.turn > 0) fetch_q(p, w, lane);
    if (lane == 0) {
        small().turn_infos[w.turn % 2] = turn_info_of(w);
        mbarrier_arrive(shared_address(&small().q_full));
    }
}

// END KEEP: starts copies of the CTA's first Q. A consumer warp does that, while the producer warps load list entries.
__device__ __forceinline__ void fetch_first_q(const AttentionParams& p, int lane) {
    const int head_tiles = num_head_tiles(p);
    copy_q(p, query_by_branch(p, blockIdx.x / head_tiles), blockIdx.x % head_tiles * HEADS, lane);
}
