// The queries of a call, those with the longest lists first, for kernels whose blocks take several in a fixed order.
//
// One block counts the queries of each of BINS ranges of length, sums, and gives every query a place. Which of a range
// comes first is left to chance: the order says when a query is worked on, and nothing else.
#include "attention/params.cuh"

constexpr int THREADS = 1024, BINS = THREADS;

__shared__ int places[BINS];
__shared__ int warp_sums[32];

// Longest first; without a list, or a negative length (there is nothing to do): last.
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
    int end = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, end, step);
        if (lane >= step) end += other;
    }
    if (lane == 31) warp_sums[warp] = end;
    __syncthreads();
    int before = warp_sums[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
    }
    before = __shfl_sync(~0u, before, (warp + 31) % 32);  // up to the warp before this one
    places[threadIdx.x] = end - count + (warp > 0 ? before : 0);
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < p.num_queries; i += THREADS) p.order[atomicAdd(&places[bin_of(p, i)], 1)] = i;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
