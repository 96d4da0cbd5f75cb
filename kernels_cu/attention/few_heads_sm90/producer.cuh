// Of few_heads_sm90: the producer warps, and Q.
#pragma once
#include "attention/few_heads_sm90/plan.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cache_policy.cuh"
#include "tile/bulk_row.cuh"

// Starts the copy of a row by the lane that has it. Rows leave L2 first.
__device__ __forceinline__ void copy_own_row(uint32_t to, const Row& row, int lane, uint32_t full) {
    copy_in_bulk(to, row_or_zeros<COPIED_BYTES>(row.data, lane), COPIED_BYTES, full, evict_first());
}

// The list entries of tile `tile` at every 16th row, from a producer warp's own quarter on.
struct TileEntries {
    int32_t of[4];

    __device__ __forceinline__ TileEntries(const AttentionParams& p, const Work& w, int i, int quarter, int row) {
#pragma unroll
        for (int k = 0; k < 4; ++k) of[k] = load_entry(p, w, w.tile(i), (quarter + k) % 4 * 16 + row);
    }
    __device__ __forceinline__ bool any_valid(const AttentionParams& p, const Work& w, int i) const {
        const uint32_t least = min(min(uint32_t(of[0]), uint32_t(of[1])), min(uint32_t(of[2]), uint32_t(of[3])));
        return least < uint32_t(w.tile(i) >= w.main_tiles ? p.extra.num_slots : p.main.num_slots);
    }
};

// The consumers are told of a stage, to which so many bytes come. The warp calls.
__device__ __forceinline__ void tell(int quarter, uint32_t number, uint32_t what, int bytes, int lane) {
    const uint32_t full = full_barrier(quarter, number);
    __syncwarp();
    if (lane == 0) small().told[quarter][number % STAGES] = what;
    mbarrier_arrive_expecting_for_warp(full, bytes, lane);
}

// A producer warp copies rows 16 `quarter` .. + 15 of every tile in which an entry is valid. Lane l holds row l % 16 of
// one tile or (l >= 16) of the next.
__device__ __forceinline__ void copy_tiles(const AttentionParams& p, const Work& w, int quarter) {
    const int lane = threadIdx.x % 32, my_row = lane % 16, my_tile = lane / 16;
    const uint32_t ring = shared_address(shared) + RING_AT + quarter * RING_BYTES;
    int copied = 0;
    uint32_t number = 0;  // of the next stage
    TileEntries entries(p, w, my_tile, quarter, my_row);
#pragma unroll 1
    for (int pair = 0; pair < w.count(); pair += 2) {
        const uint32_t filled = __ballot_sync(~0u, entries.any_valid(p, w, pair + my_tile));
        const Row row = find_row(p, w, w.tile(pair + my_tile), entries.of[0]);
        const uint32_t valid = __ballot_sync(~0u, row.data != nullptr);
        entries = TileEntries(p, w, pair + 2 + my_tile, quarter, my_row);
        copied += ((filled & 0xffff) != 0) + (filled >> 16 != 0);
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            if ((filled >> i / 2 * 16 & 0xffff) == 0) continue;
            wait_for_place(quarter, number);
            if (lane / STAGE_ROWS == i)
                copy_own_row(ring + number % STAGES * STAGE_BYTES + lane % STAGE_ROWS * STAGED, row, lane,
                             full_barrier(quarter, number));
            tell(quarter, number, valid >> STAGE_ROWS * i & (1 << STAGE_ROWS) - 1, STAGE_ROWS * COPIED_BYTES, lane);
            ++number;
        }
    }
    // Each consumer warpgroup that may wait for one more tile is told that there is none.
    const int told = min(copied + CONSUMERS, w.count());
#pragma unroll 1
    for (int i = 2 * copied; i < 2 * told; ++i, ++number) {
        wait_for_place(quarter, number);
        tell(quarter, number, NO_TILE, 0, lane);
    }
}

// Q to shared memory, each warp a head at a time, in the order of the fragments: a line a head, in column blocks of
// 64. Heads beyond the last are zeros.
__device__ __forceinline__ void load_q(const AttentionParams& p, const WorkItem& w, const Role& r) {
    constexpr int FOURS = D_QK / 4, EACH = ceil_div(FOURS, 32);
    if (r.warpgroup >= 2) {
        sync_consumers();
        return;
    }
    const int first = 4 * r.warpgroup + r.warp;
    const bf16* q = q_of(p, w.query, w.first_head) + 4 * r.lane;
    Vec8 v[HEADS / 8][EACH];
#pragma unroll
    for (int k = 0; k < HEADS / 8; ++k) {
        const int head = first + 8 * k;
        const bool here = w.first_head + head < p.h_q;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            v[k][i] = {0, 0};
            if (here && r.lane + 32 * i < FOURS) v[k][i] = *reinterpret_cast<const Vec8*>(q + head * p.q_h + 128 * i);
        }
    }
#pragma unroll
    for (int k = 0; k < HEADS / 8; ++k) {
        const int head = first + 8 * k;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int n = r.lane + 32 * i;
            if (n >= FOURS) break;
            const int item = q_item(n % 16);
            const uint32_t to = swizzled(q_lines() + n / 16 * Q_BLOCK_BYTES, head, item / 8) + item % 8 * 2;
            store_shared_4(to, v[k][i].x);
            store_shared_4(to ^ 16, v[k][i].y);
        }
    }
    sync_consumers();
}
