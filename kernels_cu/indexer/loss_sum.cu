// The indexer's loss: the sum of the tokens' divergences from indexer_loss.cu, in a fixed order, times a factor.
//
//   one CTA   a thread has every 1024th token
#include "tile/warp.cuh"

constexpr int WARPS = 32, THREADS = 32 * WARPS;

// cupy_mla/cuda/training.py declares the same fields.
struct LossSumParams {
    const float* divergences;  // [tokens]
    const int32_t* number;     // of tokens that count, which divides the loss; null: nothing does
    float* out;
    float coeff;
    int32_t tokens;
};

__shared__ float warp_sums[WARPS];

extern "C" __global__ void __launch_bounds__(THREADS) loss_sum(const __grid_constant__ LossSumParams p) {
    float sum = 0.0f, total;
#pragma unroll 4
    for (int token = threadIdx.x; token < p.tokens; token += THREADS) sum += p.divergences[token];
    cta_sum_before(sum, warp_sums, total);
    if (threadIdx.x == 0) *p.out = total * (p.number == nullptr ? p.coeff : p.coeff / max(*p.number, 1));
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
