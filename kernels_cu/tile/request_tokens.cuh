// The tokens of all requests as one list of items, so that CTAs share them evenly whatever the requests' lengths.
//
// A CTA looks at THREADS requests at a time, a thread a request, and adds up their lengths (an inclusive sum). Warps share
// the items evenly. Who has an item finds its request by bisection of the sums.
#pragma once
#include "tile/warp.cuh"

template <int THREADS>
struct RequestTokens {
    int64_t ends[THREADS];
    int64_t warp_sums[THREADS / 32];

    // Called by the whole CTA. Each thread passes its request's length, 0 where there is none. Returns the sum.
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
        int request;    // among those looked at
        int32_t token;  // its number in the request
    };

    // An item below the sum.
    __device__ __forceinline__ Item find(int64_t item) const {
        int request = 0;
#pragma unroll
        for (int step = THREADS / 2; step > 0; step /= 2)
            if (ends[request + step - 1] <= item) request += step;
        return {request, int32_t(item - (request > 0 ? ends[request - 1] : 0))};
    }
};
