// Among the four lanes that share a row of an mma accumulator (lane / 4 the same).
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Word k of lane t of four neighbouring lanes goes to word t of lane k.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], int t) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
        for (int low = 0; low < 4; ++low) {
            if (low & step) continue;
            const int high = low | step;
            const uint32_t sent = t & step ? v[low] : v[high];
            const uint32_t received = __shfl_xor_sync(~0u, sent, step);
            if (t & step) {
                v[low] = received;
            } else {
                v[high] = received;
            }
        }
    }
}
