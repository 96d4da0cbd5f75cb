// Part of bf16_sm90: O += P . V of a warpgroup's half of the columns.
#pragma once
#include "attention/bf16_sm90/scores.cuh"

// Rescales accumulators and sums to `ref`, before P relative to `ref` is multiplied; `ref` is never below their
// reference. Waits for running products first. Rare. Before the first product of a work item accumulators are zero,
// and nothing is waited for.
__device__ __forceinline__ void raise_reference(Softmax& state, const float (&ref)[2], float (&o)[128]) {
    const bool begun = __any_sync(~0u, fmaxf(state.ref[0], state.ref[1]) > -INF);
    if (begun) wgmma_wait<0>();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float by = rescale_factor(state.ref[row], ref[row]);
        state.sum[row] *= by;
        state.ref[row] = ref[row];
        state.least[row] = fmaxf(state.least[row], ref[row]);
        if (!begun) continue;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            o[4 * j + 2 * row] *= by;
            o[4 * j + 2 * row + 1] *= by;
        }
    }
}

// The same where the other warpgroup's P has another reference.
__device__ __forceinline__ void follow_reference(Softmax& state, const float (&ref)[2], float (&o)[128]) {
    if (!__all_sync(~0u, ref[0] == state.ref[0] && ref[1] == state.ref[1])) raise_reference(state, ref, o);
}

__device__ __forceinline__ uint64_t v_operand(int tile, int half) {
    return wgmma_operand(tile_address(tile) + 4 * half * BLOCK_BYTES, 1024, BLOCK_BYTES);
}

// Starts O += P . V for this warpgroup's half of V's columns, with its own P. Each half of the rows is a wgmma group,
// so that it can be waited for and released by itself.
__device__ __forceinline__ void start_pv(int tile, int half, const uint32_t (&prob)[4][4], float (&o)[128]) {
    const uint64_t v = v_operand(tile, half);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<ITEMS, Sum::ADD, Major::MN>(o, prob[k], wgmma_further(v, 2048 * k));
        if (k % 2 == 1) wgmma_commit();
    }
}

// The same with the other warpgroup's P.
__device__ __forceinline__ void start_pv(int tile, int half, float (&o)[128]) {
    const uint64_t p = wgmma_operand(p_address(tile), 1024, 16), v = v_operand(tile, half);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<ITEMS, Sum::ADD, Major::K, Major::MN>(o, wgmma_further(p, 32 * k), wgmma_further(v, 2048 * k));
        if (k % 2 == 1) wgmma_commit();
    }
}

// A warp's arrival at an `empty` barrier.
__device__ __forceinline__ void release(uint64_t& barrier, int lane) {
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&barrier), lane);
}

// Releases a region whose product is running: each half of its rows once it has been multiplied.
__device__ __forceinline__ void release_halves(uint64_t (&empty)[2], int lane) {
    wgmma_wait<1>();
    release(empty[0], lane);
    wgmma_wait<0>();
    release(empty[1], lane);
}
