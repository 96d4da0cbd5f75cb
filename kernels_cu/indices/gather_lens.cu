// How many tokens at the end of each prefill's sequence the windows of its queries cover. One thread a prefill.
#include "indices/queries.cuh"

// The launcher declares the same fields.
struct GatherLensParams {
    Queries queries;
    int32_t* out;  // [num_requests - num_decodes]
    int32_t num_decodes;
    int32_t window;
};

constexpr int THREADS = REQUESTS_PER_BLOCK;

extern "C" __global__ void __launch_bounds__(THREADS) gather_lens(const __grid_constant__ GatherLensParams p) {
    const int prefill = blockIdx.x * THREADS + threadIdx.x, request = p.num_decodes + prefill;
    if (request >= p.queries.num_requests) return;
    const int32_t query_len = p.queries.starts[request + 1] - p.queries.starts[request];
    p.out[prefill] = query_len + min(p.queries.seq_lens[request] - query_len, p.window - 1);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
