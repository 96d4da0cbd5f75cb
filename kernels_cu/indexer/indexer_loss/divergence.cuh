// How indexer_loss compares the two distributions over a list: KL(target | softmax of the scores), and its derivative
// by each score, dI.
#pragma once
#include "indexer/indexer_loss/plan.cuh"
#include "ptx/arithmetic.cuh"

// The maximum and the sum over the CTA, the same in all threads. Called by the CTA.
__device__ __forceinline__ float cta_max(float x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < WARPS; ++i) x = fmaxf(x, warp_sums[i]);
    return x;
}
__device__ __forceinline__ float cta_sum(float x) {
    float total;
    __syncthreads();  // all have read the sums before
    cta_sum_before(x, warp_sums, total);
    return total;
}

__device__ __forceinline__ float logarithm(float x) { return log2_approx(x) * LN2; }

// Stores KL. Stores dI in the place of the scores, and zeros behind them up to the end of the last tile. `largest` is
// the largest score of this thread.
__device__ __forceinline__ void compare(const IndexerLossParams& p, const Token& token, float largest) {
    largest = cta_max(largest);
    float exponentials = 0.0f, targets = 0.0f, divergence = 0.0f;  // sums
    for (int entry = threadIdx.x; entry < token.count; entry += THREADS) {
        exponentials += exp2_approx((token.scores[entry] - largest) * LOG2E);
        targets += token.target[token.places[entry]];
    }
    exponentials = cta_sum(exponentials);
    targets = max_or_nan(cta_sum(targets), LEAST);
    const float log_sum = logarithm(exponentials);
    const float factor = p.number == nullptr ? p.coeff : p.coeff / max(*p.number, 1);
    const int end = ceil_div(token.count, TILE_KEYS) * TILE_KEYS;
    for (int entry = threadIdx.x; entry < end; entry += THREADS) {
        float d_score = 0.0f;
        if (entry < token.count) {
            const float score = token.scores[entry] - largest, predicted = exp2_approx(score * LOG2E) / exponentials;
            const float target = token.target[token.places[entry]] / targets;
            divergence += target * (logarithm(fmaxf(target, LEAST)) - (score - log_sum));
            d_score = factor * (predicted - target);
        }
        token.scores[entry] = d_score;
        if constexpr (QUANTIZED) {
            token.scores[p.padded + entry] = entry < token.count ? token.scaled(p, entry, d_score) : 0.0f;
        }
    }
    divergence = cta_sum(divergence);
    if (threadIdx.x == 0) p.divergences[token.index] = divergence;
}
