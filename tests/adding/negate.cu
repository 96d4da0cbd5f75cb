// Negates float32 values, one a thread. No shared memory.
#include "ptx/types.cuh"

// The launcher declares the same fields.
struct NegateParams {
    const float* x;  // [size]
    float* out;      // [size]
    int64_t size;
};

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) negate(const __grid_constant__ NegateParams p) {
    const int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < p.size) p.out[i] = -p.x[i];
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
