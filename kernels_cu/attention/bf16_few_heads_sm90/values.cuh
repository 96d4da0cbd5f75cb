// Part of bf16_few_heads_sm90: O^T += V^T . P^T, and the lock with which warpgroups take turns at the tensor cores.
#pragma once
#include "attention/bf16_few_heads_sm90/plan.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

// Starts O^T += V^T . P^T for column blocks BEGIN to END - 1.
template <int BEGIN, int END>
__device__ __forceinline__ void start_pv(const Role& r, float (&o)[V_BLOCKS][HEADS / 2]) {
    const uint64_t tile = wgmma_operand(tile_of(r), 1024, BLOCK_BYTES);
    const uint64_t p = wgmma_operand(tile_of(r) + V_BLOCKS * BLOCK_BYTES, 1024, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int v = BEGIN; v < END; ++v)
            wgmma<Values::BF16, Sum::ADD, Major::MN, Major::K>(o[v], wgmma_further(tile, v * BLOCK_BYTES + 2048 * k),
                                                               wgmma_further(p, 32 * k));
    }
    wgmma_commit();
}

// Releases a stage of the tile.
__device__ __forceinline__ void release(const Role& r, int stage) {
    mbarrier_arrive_for_warp(shared_address(&small().empty[r.warpgroup * STAGES + stage]), r.lane);
}

// A warpgroup holds the tensor cores from a tile's Q . K to its P . V. Without this lock both warpgroups would soon
// wait for rows at the same time, and multiply at the same time.
__device__ __forceinline__ void acquire_tensor_cores(const Role& r) {
    if (threadIdx.x % WARPGROUP == 0)
        while (atomicCAS(&small().multiplying, 0, WARPGROUP / 32) != 0) __nanosleep(20);
    sync_warpgroup(r);
}

__device__ __forceinline__ void release_tensor_cores(const Role& r) {
    if (r.lane == 0) atomicSub(&small().multiplying, 1);
}

// O^T += V^T . P^T. The tile's stages are released one by one, except those of a work item's last tile.
__device__ __forceinline__ void multiply_pv(const Role& r, bool last, float (&o)[V_BLOCKS][HEADS / 2]) {
    start_pv<0, 2>(r, o);
    start_pv<2, 4>(r, o);
    start_pv<4, 6>(r, o);
    start_pv<6, 8>(r, o);
    wgmma_wait<3>();
    if (!last) release(r, 0);
    wgmma_wait<2>();
    if (!last) release(r, 1);
    wgmma_wait<1>();
    release_tensor_cores(r);
    if (!last) release(r, 2);
    wgmma_wait<0>();
    if (!last) release(r, 3);
}
