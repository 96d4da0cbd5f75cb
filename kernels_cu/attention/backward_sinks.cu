// The gradient of the attention sinks: d_sink[h] = - the sum over queries of the terms that backward.cu has written.
//
//   grid   x 32 heads
//   CTA    32 warps; a lane has one head, a warp every 32nd query
#include "ptx/types.cuh"

constexpr int WARPS = 32, THREADS = 32 * WARPS;

// cupy_mla/cuda/backward.py declares the same fields.
struct BackwardSinksParams {
    const float* terms;  // [queries, heads]
    float* out;          // [heads]
    int64_t out_stride;  // items
    int32_t queries, heads;
};

__shared__ float sums[WARPS][32];

extern "C" __global__ void __launch_bounds__(THREADS) backward_sinks(const __grid_constant__ BackwardSinksParams p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = 32 * blockIdx.x + lane;
    float sum = 0.0f;
    if (head < p.heads) {
#pragma unroll 8
        for (int query = warp; query < p.queries; query += WARPS) sum += p.terms[int64_t(query) * p.heads + head];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || head >= p.heads) return;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) sum += sums[w][lane];
    p.out[head * p.out_stride] = -sum;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
