// Accumulators of products whose N side is the heads: S^T and O^T. A lane 4 g + t has rows g and g + 8 of its warp's 16.
#pragma once
#include "ptx/types.cuh"

// The element of row i of a thread's two and its c-th head, which is 8 (c / 2) + 2 t + c % 2.
constexpr __device__ int element(int i, int c) { return c / 2 * 4 + 2 * i + c % 2; }

// A softmax of each of a thread's heads.
template <int COLUMNS>
struct HeadsSoftmax {
    float ref[COLUMNS], sum[COLUMNS], max[COLUMNS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            ref[c] = max[c] = -INF;
            sum[c] = 0.0f;
        }
    }
};

// Over the lanes with the same t: all eight g.
__device__ __forceinline__ float rows_max(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
__device__ __forceinline__ float rows_sum(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
