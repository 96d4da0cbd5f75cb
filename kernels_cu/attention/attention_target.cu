// The target of the indexer's loss: the attention's weights, summed over a token's heads.
//
//   grid   x token
//   CTA    the token's heads in blocks of HEADS, one after the other; for each, the rows of its list (head_scores.cuh)
//
//   S = rows.Q^T in registers -> P = sigma * exp2(S * scale - lse) -> summed over a lane's heads, then over a quad.
//   Each lane is left with one entry. It writes that sum; sums of the next head blocks are added to it.
//
// Shared memory, bytes: 2 * HEADS * D_QK, and 8 a head. 64 heads of 576: 74,240.
#include "attention/head_scores.cuh"
#include "ptx/arithmetic.cuh"
#include "tile/warp.cuh"

// cupy_mla/cuda/training.py declares the same fields.
struct AttentionTargetParams : HeadScoresParams {
    const float* lse;                                     // [tokens, h_q]
    const float* sink;                                    // [h_q], or null
    float* out;                                           // [tokens, topk]
    int64_t lse_token, lse_head, sink_stride, out_token;  // items
};

struct HeadNumbers {
    float lse[HEADS], sigma[HEADS];  // lse in base 2
};
constexpr int SHARED_BYTES = Q_BYTES + int(sizeof(HeadNumbers));

__device__ __forceinline__ HeadNumbers& numbers() { return *reinterpret_cast<HeadNumbers*>(shared + Q_BYTES); }

// P of a head that does not exist is 0.
__device__ __forceinline__ void find_head_numbers(const AttentionTargetParams& p, int first) {
    const int line = threadIdx.x, head = first + line;
    if (line >= HEADS) return;
    const float lse = head < p.h_q ? p.lse[blockIdx.x * p.lse_token + head * p.lse_head] : INF;
    const bool sinks = p.sink != nullptr && head < p.h_q;
    numbers().lse[line] = lse * LOG2E;
    numbers().sigma[line] = sinks ? 1.0f / (1.0f + exp2_approx((p.sink[head * p.sink_stride] - lse) * LOG2E)) : 1.0f;
}

// The sum over the heads of the lane's entry, 8 t + g of the warp's.
__device__ __forceinline__ float sum_of_heads(const HeadScoresParams& p, const Scores& s) {
    const int t = threadIdx.x % 4;
    float sums[4] = {};
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int line = 8 * j + 2 * t + k;
            const float lse = numbers().lse[line], sigma = numbers().sigma[line];
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const float logit = s[x / 2][j][2 * (x % 2) + k];
                sums[x] = fmaf(sigma, exp2_approx(logit * p.scale_log2 - lse), sums[x]);
            }
        }
    }
    return quad_sum_of_mine(sums, t);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_target(const __grid_constant__ AttentionTargetParams p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = lane % 4 * 8 + lane / 4;
    const Entries entries = Entries::of_cta(p);
#pragma unroll 1
    for (int head = 0; head < p.h_q; head += HEADS) {
        __syncthreads();  // all have read the heads before
        bring_heads(p, head);
        find_head_numbers(p, head);
        __syncthreads();
#pragma unroll 1
        for (int first = ENTRIES * warp; first < p.topk; first += ROUND) {
            Rows rows;
            float sum = 0.0f;
            const int entry = first + mine;
            if (find_rows(p, entries, first, rows)) {
                Scores s;
                multiply(p, rows, s);
                sum = sum_of_heads(p, s);
            }
            if (entry >= p.topk) continue;
            float* out = p.out + blockIdx.x * p.out_token + entry;
            if (entries.row(p, entry) < 0) sum = 0.0f;
            *out = head == 0 ? sum : *out + sum;
        }
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
