// How a producer warp of logits_sm90 copies units of keys to the ring, and signals that they are there.
#pragma once
#include "indexer/logits_sm90/plan.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"

// Whether every unit lies in one block. By a schedule that is so.
__device__ __forceinline__ bool units_lie_in_blocks(const LogitsParams& p) {
    return PAGED && !CANDIDATES && p.table.block_size.value % UNIT == 0;
}

// The blocks of keys number `lane` and `lane` + 32 of a unit. If the unit lies in one block, at[0] of every lane is the
// block of the unit's first key.
struct UnitBlocks {
    KeyBlock at[2];

    __device__ __forceinline__ void find(const LogitsParams& p, int request, int first, int end, int lane) {
        if (units_lie_in_blocks(p)) {
            at[0] = block_of_key(p, request, first, end);
            return;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) at[i] = block_of_key(p, request, first + 32 * i + lane, end);
    }
};

__device__ __forceinline__ uint64_t policy_of_keys(const LogitsParams& p) {
    const int64_t keys = int64_t(p.requests) * p.width;
    if (SCHEDULED && keys > KEYS_KEPT_IN_L2 && keys <= KEYS_HALF_KEPT_IN_L2) return evict_half_first();
    return keys <= KEYS_KEPT_IN_L2 ? evict_normal() : evict_first();
}

// Copies a unit's keys and scales to a stage, by a warp. Keys that do not exist become zeros.
__device__ __forceinline__ void copy_unit(const LogitsParams& p, const UnitBlocks& blocks, int first, int end,
                                          int stage, int lane, uint64_t policy) {
    Small& sm = small();
    constexpr int CHUNKS = KEY_BYTES / 16, ROWS_AT_ONCE = 32 / CHUNKS, TIMES = UNIT / ROWS_AT_ONCE;
    const int row = lane / CHUNKS, chunk = lane % CHUNKS;  // of the rows that the warp copies at a time
    const uint32_t to = stage_rows(stage) + row * KEY_BYTES;
    const uint32_t to_chunk[2] = {to + (MXFP4 ? 16 * chunk : swizzle(row, chunk)),
                                  to + (MXFP4 ? 16 * chunk : swizzle(row + 4, chunk))};
    const uint32_t scales = shared_address(sm.scales[stage]) + 4 * lane;
    const auto copy_row = [&](int i, const uint8_t* from, bool exists) {
        const uint32_t there = to_chunk[i % 2] + i * ROWS_AT_ONCE * KEY_BYTES;
        if constexpr (KEYS_HAVE_POLICY) {
            cp_async_16(there, from + 16 * chunk, exists, policy);
        } else {
            cp_async_16(there, from + 16 * chunk, exists);
        }
    };
    uint32_t exists[2] = {~0u, ~0u};
    if constexpr (!PAGED) {
        const uint8_t* from = p.keys + (first + row) * p.key_stride;
#pragma unroll
        for (int i = 0; i < 16; ++i) copy_row(i, from + 4 * i * p.key_stride, first + 4 * i + row < end);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            cp_async_4(scales + 128 * i, p.scales + first + 32 * i + lane, first + 32 * i + lane < end);
    } else if (SCHEDULED || units_lie_in_blocks(p)) {
        const KeyPlace place = place_of_key(p, blocks.at[0], first, end);
        const bool there = place.data >= 0;
        const uint8_t* from = p.keys + place.data + row * KEY_BYTES;
#pragma unroll
        for (int i = 0; i < TIMES; ++i) copy_row(i, from + i * ROWS_AT_ONCE * KEY_BYTES, there);
#pragma unroll
        for (int i = 0; i < 2; ++i) cp_async_4(scales + 128 * i, place.scale + 32 * i + lane, there);
        if (!there) exists[0] = exists[1] = 0;
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const KeyPlace place = place_of_key(p, blocks.at[half], first + 32 * half + lane, end);
#pragma unroll
            for (int i = 0; i < TIMES / 2; ++i) {
                const int64_t from = __shfl_sync(~0u, place.data, i * ROWS_AT_ONCE + row);
                copy_row(TIMES / 2 * half + i, p.keys + from, from >= 0);
            }
            cp_async_4(scales + 128 * half, place.scale, place.data >= 0);
            exists[half] = __ballot_sync(~0u, place.data >= 0);
        }
    }
    if (lane == 0) {
        sm.exists[stage][0] = exists[0];
        sm.exists[stage][1] = exists[1];
    }
}

// The units whose copies a producer warp has started, but not signalled yet (UNDERWAY > 0).
struct UnitsUnderway {
    RingPlace oldest;
    int count;

    // All copies of a unit were started.
    __device__ __forceinline__ void add(int stage, int lane) {
        if constexpr (UNDERWAY == 0) {
            const uint32_t full = shared_address(&small().full[stage]);
            mbarrier_arrive_for_warp(full, lane);
            mbarrier_arrive_after_copies(full);
        } else {
            cp_async_commit();
            if (++count <= UNDERWAY) return;
            cp_async_wait<UNDERWAY>();
            signal_oldest(lane);
        }
    }
    __device__ __forceinline__ void signal_all(int lane) {
        if (count == 0) return;
        cp_async_wait<0>();
        while (count > 0) signal_oldest(lane);
    }

  private:
    // The copies of the oldest unit are done.
    __device__ __forceinline__ void signal_oldest(int lane) {
        fence_proxy_async();
        __syncwarp();
        mbarrier_arrive_for_warp(shared_address(&small().full[oldest.stage]), lane);
        oldest.advance(PRODUCERS);
        --count;
    }
};

// Waits until the buffer of tile number `turn` is free. Math warpgroups may be waiting for units under way before they
// free it: these are signalled first.
__device__ __forceinline__ void wait_for_buffer(int turn, UnitsUnderway& underway, int lane) {
    const uint32_t empty = shared_address(&small().tile_empty[turn % BUFFERS]), parity = turn / BUFFERS % 2 ^ 1;
    if (UNDERWAY && !__all_sync(~0u, mbarrier_done(empty, parity))) underway.signal_all(lane);
    mbarrier_wait(empty, parity);
}
