// Counts the tokens of each request that lie on a rank. One thread a request.
#include "indices/ownership.cuh"

// The launcher declares the same fields.
struct LocalLensParams {
    Ownership owner;
    const int32_t* lens;  // [requests]
    int32_t* out;         // [requests]; may be `lens`
    int32_t requests;
    int32_t unused;
};

constexpr int THREADS = LENS_PER_BLOCK;

extern "C" __global__ void __launch_bounds__(THREADS) local_lens(const __grid_constant__ LocalLensParams p) {
    const int request = blockIdx.x * THREADS + threadIdx.x;
    if (request < p.requests) p.out[request] = local_length(p.owner, p.lens[request]);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
