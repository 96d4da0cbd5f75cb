// Accumulators of products whose N side is the heads: S^T and O^T. Lane 4 g + t holds rows g and g + 8 of its warp's
// 16, and heads 8 j + 2 t + k, k = 0, 1. These are heads number 2 j + k of the thread.
#pragma once
#include "ptx/types.cuh"

// The index, among a thread's accumulators, of its row i (of two) and its c-th head.
constexpr __device__ int element(int i, int c) { return c / 2 * 4 + 2 * i + c % 2; }

// Softmax state of a thread's heads. `sum` and `max` cover this thread's rows only; O^T and `sum` are relative to
// `ref`.
template <int COUNT>
struct HeadsSoftmax {
    float ref[COUNT], sum[COUNT], max[COUNT];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            ref[c] = max[c] = -INF;
            sum[c] = 0.0f;
        }
    }
};
