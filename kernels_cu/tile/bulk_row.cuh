// Copying rows that an index list names into shared memory as they are, each by one bulk copy.
#pragma once
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"

// Rows of zeros. They are copied where a list names no row, so that no lane takes another way and stages count alike. Each
// lane has a row of its own, or all copies would come from the same places of L2.
constexpr int ZERO_ROWS = 16;
template <int BYTES>
__device__ uint4 zero_rows[ZERO_ROWS * BYTES / 16] = {};

// A row of BYTES, or zeros if `row` is null.
template <int BYTES>
__device__ __forceinline__ const uint8_t* row_or_zeros(const uint8_t* row, int lane) {
    return row != nullptr ? row : reinterpret_cast<const uint8_t*>(zero_rows<BYTES> + lane % ZERO_ROWS * (BYTES / 16));
}

// Called by a warp that has read where bulk copies will write. Its lanes meet; then one of them may arrive at the barrier
// for which the copies wait. The thread that starts the copies passes a fence.proxy.async before. racecheck looks for that
// fence in the threads that have read.
__device__ __forceinline__ void release_reads() {
    if (WARP_ARRIVALS == 32) fence_proxy_async();
    __syncwarp();
}
