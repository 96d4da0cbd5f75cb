// Orders the queries of a call by list length, the longest lists first, for kernels whose CTAs take several queries in
// a fixed order.
//
// One CTA counts the queries in each of BINS ranges of length, sums the counts up, and gives every query a place. The
// order within a bin is arbitrary: it decides only when a query is worked on.
#include "attention/params.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 1024, BINS = THREADS;

__shared__ int places[BINS];
__shared__ int warp_sums[32];

// The bin of a query; the longest lists have bin 0. A query with an empty list or a negative length (nothing to do)
// comes last.
__device__ __forceinline__ int bin_of(const AttentionParams& p, int query) {
    const int length = list_length(p.main, query_of(p, query).b);
    return int(int64_t(p.main.topk - length) * (BINS - 1) / max(p.main.topk, 1));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) order_queries(const __grid_constant__ AttentionParams p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    places[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < p.num_queries; i += THREADS) atomicAdd(&places[bin_of(p, i)], 1);
    __syncthreads();
    const int count = places[threadIdx.x];
    const int end = inclusive_sum(count, lane);
    if (lane == 31) warp_sums[warp] = end;
    __syncthreads();
    // The sum over all previous warps.
    const int before = __shfl_sync(~0u, inclusive_sum(warp_sums[lane], lane), (warp + 31) % 32);
    places[threadIdx.x] = end - count + (warp > 0 ? before : 0);
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < p.num_queries; i += THREADS) p.order[atomicAdd(&places[bin_of(p, i)], 1)] = i;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
