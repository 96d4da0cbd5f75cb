// The tokens of all requests as one list of items, so that CTAs share them evenly whatever the requests' lengths.
//
// A CTA looks at THREADS requests at a time, a thread a request: an inclusive sum over their lengths. Items are then
// dealt out to warps, and whoever has an item finds its request by bisection of the sums.
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

    // The loop of a persistent CTA. `length_of(request)` is the tokens of a request (0 for requests there are not);
    // each warp takes ITEMS items at a time and calls act(first request, item of lane % ITEMS, whether there is such
    // an item).
    template <int ITEMS, typename LengthOf, typename Act>
    __device__ __forceinline__ void for_each(int num_requests, LengthOf length_of, Act act) {
        constexpr int WARPS = THREADS / 32;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int request = 0; request < num_requests; request += THREADS) {
            const int64_t total = sum_up(length_of(request + threadIdx.x));
            const int64_t stride = int64_t(gridDim.x) * WARPS * ITEMS;
            for (int64_t first = (int64_t(blockIdx.x) * WARPS + warp) * ITEMS; first < total; first += stride) {
                const int64_t item = first + lane % ITEMS;
                act(request, item, item < total);
            }
            __syncthreads();  // all have read the sums
        }
    }
};
