// Counts the tokens at the end of each prefill's sequence that the sliding windows of its queries cover. One thread a
// prefill.
#include "indices/queries.cuh"

// The launcher declares the same fields.
struct GatherLensParams {
    Queries queries;
    const int32_t* replay_start;  // [num_requests] first position with a row; null: 0
    int32_t* out;                 // [num_requests - num_decodes]
    int32_t num_decodes;
    int32_t window;
};

constexpr int THREADS = REQUESTS_PER_BLOCK;

extern "C" __global__ void __launch_bounds__(THREADS) gather_lens(const __grid_constant__ GatherLensParams p) {
    const int prefill = blockIdx.x * THREADS + threadIdx.x, request = p.num_decodes + prefill;
    if (request >= p.queries.num_requests) return;
    const int32_t query_len = p.queries.starts[request + 1] - p.queries.starts[request];
    const int64_t start = p.replay_start == nullptr ? 0 : p.replay_start[request];
    const int64_t before = int64_t(p.queries.seq_lens[request]) - query_len - start;
    p.out[prefill] = query_len + int32_t(min(max(before, int64_t(0)), int64_t(p.window) - 1));
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
