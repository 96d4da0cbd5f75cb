// Copies of rows, which an index list names, to shared memory, by one bulk copy each.
#pragma once
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"

// Rows of zeros. One is copied where a list entry is not valid, so that all lanes run the same code and each stage
// gets the same number of bytes. Each lane has a row of its own, since else all copies would read the same lines of
// L2.
constexpr int ZERO_ROWS = 16;
template <int BYTES>
__device__ uint4 zero_rows[ZERO_ROWS * BYTES / 16] = {};

// A row of BYTES, or zeros if `row` is null.
template <int BYTES>
__device__ __forceinline__ const uint8_t* row_or_zeros(const uint8_t* row, int lane) {
    return row != nullptr ? row : reinterpret_cast<const uint8_t*>(zero_rows<BYTES> + lane % ZERO_ROWS * (BYTES / 16));
}

// Called by a warp that has read where bulk copies will write. After it one lane may arrive at the barrier for which
// the copies wait; the thread that starts the copies calls fence_proxy_async before. (With EVERY_LANE_ARRIVES the
// readers fence, too, because racecheck looks for the fence in their threads.)
__device__ __forceinline__ void release_reads() {
    if (WARP_ARRIVALS == 32) fence_proxy_async();
    __syncwarp();
}
