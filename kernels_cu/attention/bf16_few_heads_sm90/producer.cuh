// Part of bf16_few_heads_sm90: the producers' copies of rows, and the consumers' copies of Q.
#pragma once
#include "attention/bf16_few_heads_sm90/list_end.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"

// Starts a copy of 16 bytes of a row. QUERIES 1: a call mostly reads a row once, so it is the first to leave L2.
__device__ __forceinline__ void copy_chunk(uint32_t to, const uint8_t* from, bool valid) {
    if constexpr (QUERIES == 1) {
        cp_async_16(to, from, valid, evict_first());
    } else {
        cp_async_16(to, from, valid);
    }
}

// A producer warp copies rows 16 `quarter` .. + 15 of its warpgroup's tiles. Lane l holds the address of row l % 16 of
// these; eight lanes copy 128 bytes of a row.
__device__ __forceinline__ void copy_tiles(const AttentionParams& p, Work w, int warpgroup, int quarter,
                                           uint32_t& parity) {
    const int lane = threadIdx.x % 32, chunk = lane % 8, my_row = 16 * quarter + lane % 16;
    const uint32_t tile_at = shared_address(shared) + TILE_AT + warpgroup * TILE_BYTES;
    Small& sm = small();
    const int32_t last_entry = load_last_entry(p, w);
    int32_t entry = load_entry(p, w, w.begin, my_row);
    w.end = find_end(p, w, PRODUCER_VOTE + warpgroup, last_entry);
#pragma unroll 1
    for (int tile = w.begin; tile < w.end; tile += w.step) {
        const uint8_t* row = find_row(p, w, tile, entry).data;
        const bool has_rows = any(PRODUCER_VOTE + warpgroup, row != nullptr);
        entry = load_entry(p, w, tile + w.step, my_row);  // after the barrier, which would wait for the load
        if (!has_rows && !is_last(w, tile)) continue;
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_wait(shared_address(&sm.empty[warpgroup * STAGES + stage]), parity);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int line = 16 * quarter + 4 * i + lane / 8;
                const uint8_t* from = shuffle_pointer(row, 4 * i + lane / 8);
                // An integer, because else the compiler keeps the offsets in all blocks, 128 b + 16 chunk, in
                // registers.
                const uint64_t mine = reinterpret_cast<uint64_t>(from) + chunk * 16;
                const uint32_t to = swizzled(tile_at, line, chunk);
#pragma unroll
                for (int b = 2 * stage; b < (stage == STAGES - 1 ? BLOCKS : 2 * stage + 2); ++b)
                    copy_chunk(to + b * BLOCK_BYTES, reinterpret_cast<const uint8_t*>(mine) + b * 128,
                               from != nullptr);
            }
            mbarrier_arrive_after_copies(shared_address(&sm.full[warpgroup * STAGES + stage]));
        }
        parity ^= 1;
    }
}

// Starts to copy Q: a line for each head, in column blocks like those of a tile. Heads beyond the last are zeros.
__device__ __forceinline__ void copy_q(const AttentionParams& p, const Work& w, const Role& r) {
    constexpr int COPYING_THREADS = QUERIES == 2 ? WARPGROUP : 2 * WARPGROUP;
    constexpr int UNROLLED = HEADS == 32 ? 2 : 4;  // with 4 some would spill
    const bf16* q = p.q + w.query.b * p.q_b + w.query.s * p.q_s;
    const uint32_t to = q_lines(r);
#pragma unroll UNROLLED
    for (int item = threadIdx.x % COPYING_THREADS; item < HEADS * BLOCKS * 8; item += COPYING_THREADS) {
        const int chunk = item % 8, block = item / 8 % BLOCKS, head = item / 8 / BLOCKS;
        const bool here = w.first_head + head < p.h_q;
        cp_async_16(swizzled(to + block * Q_BLOCK_BYTES, head, chunk),
                    here ? q + (w.first_head + head) * p.q_h + 64 * block + 8 * chunk : nullptr, here);
    }
}

// Waits for Q. All consumer threads that share it call.
__device__ __forceinline__ void wait_for_q(const Role& r) {
    cp_async_wait_all();
    fence_proxy_async();
    if (QUERIES == 1) {
        sync_consumers();
    } else {
        sync_warpgroup(r);
    }
}
