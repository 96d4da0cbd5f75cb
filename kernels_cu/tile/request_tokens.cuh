// The tokens of all requests as one list of items, so that CTAs share them evenly, whatever the lengths of the
// requests.
//
// A CTA takes THREADS requests at a time, one a thread, and computes the inclusive sum of their lengths. Items are
// divided evenly over the warps. An item's request is found by bisection of the sums.
#pragma once
#include "tile/warp.cuh"

template <int THREADS>
struct RequestTokens {
    int64_t ends[THREADS];
    int64_t warp_sums[THREADS / 32];

    // Computes the sums. All threads of the CTA call, each with its request's length, 0 where there is none. Returns
    // the total.
    __device__ __forceinline__ int64_t sum_up(int64_t length) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        length = inclusive_sum(length, lane);
        if (lane == 31) warp_sums[warp] = length;
        __syncthreads();
        for (int w = 0; w < warp; ++w) length += warp_sums[w];
        ends[threadIdx.x] = length;
        __syncthreads();
        return ends[THREADS - 1];
    }

    struct Item {
        int request;    // its number among the THREADS requests
        int32_t token;  // its number in the request
    };

    // Finds an item; its number is below the total.
    __device__ __forceinline__ Item find(int64_t item) const {
        int request = 0;
#pragma unroll
        for (int step = THREADS / 2; step > 0; step /= 2)
            if (ends[request + step - 1] <= item) request += step;
        return {request, int32_t(item - (request > 0 ? ends[request - 1] : 0))};
    }
};
