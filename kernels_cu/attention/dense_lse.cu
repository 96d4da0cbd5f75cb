// lse of a token's heads over a range of rows, for training.
//
//   grid   x token, y block of HEADS heads
//   CTA    the block's heads, all rows of the range (head_scores.cuh)
//
//   S = rows.Q^T stays in registers. For each of its heads a lane keeps the largest logit so far and the sum of
//   exponentials relative to it. After the last row, the lanes that hold the same head merge theirs, then the warps
//   do, in order.
//
// Shared memory, bytes: 2 * HEADS * D_QK, and 64 a head. 64 heads of 576: 77,824.
#include "attention/head_scores.cuh"
#include "ptx/arithmetic.cuh"
#include "tile/warp.cuh"

// cupy_mla/cuda/training.py declares the same fields.
struct DenseLseParams : HeadScoresParams {
    float* out;                   // [tokens, h_q]
    int64_t out_token, out_head;  // items
};

struct Partials {
    float largest[WARPS][HEADS], sums[WARPS][HEADS];
};
constexpr int SHARED_BYTES = Q_BYTES + int(sizeof(Partials));

__device__ __forceinline__ Partials& partials() { return *reinterpret_cast<Partials*>(shared + Q_BYTES); }

// Merges two sums of exponentials, each relative to its largest logit. Logits are in base 2.
__device__ __forceinline__ void merge(float& largest, float& sum, float other_largest, float other_sum) {
    const float most = fmaxf(largest, other_largest);
    if (most == -INF && sum == 0.0f && other_sum == 0.0f) return;  // both are empty
    sum = sum * exp2_approx(largest - most) + other_sum * exp2_approx(other_largest - most);
    largest = most;
}

extern "C" __global__ void __launch_bounds__(THREADS) dense_lse(const __grid_constant__ DenseLseParams p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Entries entries = Entries::of_cta(p);
    bring_heads(p, HEADS * blockIdx.y);
    __syncthreads();
    float largest[N_TILES][2], sums[N_TILES][2];
#pragma unroll
    for (int j = 0; j < N_TILES; ++j)
#pragma unroll
        for (int k = 0; k < 2; ++k) largest[j][k] = -INF, sums[j][k] = 0.0f;
#pragma unroll 1
    for (int first = entries.start + ENTRIES * warp; first < entries.end; first += ROUND) {
        Rows rows;
        Scores s;
        find_rows(p, entries, first, rows);
        multiply(p, rows, s);
#pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float most = largest[j][k];
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    float& logit = s[x / 2][j][2 * (x % 2) + k];
                    logit = rows[x] < 0 ? -INF : logit * p.scale_log2;
                    most = fmaxf(most, logit);
                }
                const float base = most == -INF ? 0.0f : most;
                float sum = sums[j][k] * exp2_approx(largest[j][k] - base);
#pragma unroll
                for (int x = 0; x < 4; ++x) sum += exp2_approx(s[x / 2][j][2 * (x % 2) + k] - base);
                largest[j][k] = most, sums[j][k] = sum;
            }
        }
    }
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float most = largest[j][k], sum = sums[j][k];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
                const float other = __shfl_xor_sync(~0u, most, step), other_sum = __shfl_xor_sync(~0u, sum, step);
                merge(most, sum, other, other_sum);
            }
            if (g == 0)
                partials().largest[warp][8 * j + 2 * t + k] = most, partials().sums[warp][8 * j + 2 * t + k] = sum;
        }
    }
    __syncthreads();
    const int line = threadIdx.x, head = HEADS * blockIdx.y + line;
    if (line >= HEADS || head >= p.h_q) return;
    float most = -INF, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) merge(most, sum, partials().largest[w][line], partials().sums[w][line]);
    const float lse = entries.start < entries.end ? (most + log2_approx(sum)) * LN2 : INF;
    p.out[blockIdx.x * p.out_token + head * p.out_head] = lse;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
