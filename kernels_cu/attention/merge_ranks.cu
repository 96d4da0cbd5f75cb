// Merges the attention results of several ranks, each over its own rows:
//
//   grid   x token, y head
//   CTA    128 threads with 4 output columns each; the loads of AT_ONCE ranks are in flight at a time
//
// Ranks are added in their order. A rank whose lse is infinite had no row, and its output is ignored. BF16: the ranks'
// outputs are bfloat16, otherwise float32.
#include "ptx/arithmetic.cuh"
#include "ptx/convert.cuh"
#include "ptx/griddepcontrol.cuh"

// The launcher declares the same fields.
struct MergeRanksParams {
    const void* outs;                          // [ranks, tokens, heads, 512]
    const float* lses;                         // [ranks, tokens, heads]
    const float* sink;                         // [heads], or null
    bf16* out;                                 // [tokens, heads, 512]
    float* lse;                                // [tokens, heads]
    int64_t outs_rank, outs_token, outs_head;  // items, as all strides
    int64_t lses_rank, lses_token, lses_head;
    int64_t out_token, out_head, lse_token, lse_head;
    int32_t ranks;
    int32_t aligned;  // rows allow loads and stores of four values
};

constexpr int COLUMNS = 4, THREADS = 512 / COLUMNS, AT_ONCE = 4;

#if BF16
using Value = bf16;
__device__ __forceinline__ float to_float(bf16 v) { return bf16_to_float(v); }
#else
using Value = float;
__device__ __forceinline__ float to_float(float v) { return v; }
#endif

// Four neighbouring values of a rank's output.
__device__ __forceinline__ float4 load_values(const Value* from, bool aligned) {
    if (!aligned) return {to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])};
#if BF16
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    return {bf16_low(two.x), bf16_high(two.x), bf16_low(two.y), bf16_high(two.y)};
#else
    return *reinterpret_cast<const float4*>(from);
#endif
}

__device__ __forceinline__ void store_values(bf16* to, const float4& v, bool aligned) {
    const uint2 two = {pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w)};
    if (aligned) {
        *reinterpret_cast<uint2*>(to) = two;
        return;
    }
    to[0] = bf16(two.x);
    to[1] = bf16(two.x >> 16);
    to[2] = bf16(two.y);
    to[3] = bf16(two.y >> 16);
}

// The largest finite lse of the ranks; -INF if there is none.
__device__ __forceinline__ float largest_lse(const float* lses, const MergeRanksParams& p) {
    float top = -INF;
    for (int rank = 0; rank < p.ranks; ++rank) {
        const float lse = lses[rank * p.lses_rank];
        if (fabsf(lse) != INF) top = max_or_nan(top, lse);
    }
    return top;
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_ranks(const __grid_constant__ MergeRanksParams p) {
    let_next_kernel_start();
    wait_for_earlier_kernels();
    const int token = blockIdx.x, head = blockIdx.y, column = COLUMNS * threadIdx.x;
    const float* lses = p.lses + token * p.lses_token + head * p.lses_head;
    const Value* outs = static_cast<const Value*>(p.outs) + token * p.outs_token + head * p.outs_head + column;
    const float top = largest_lse(lses, p);
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
    float sum = 0.0f;
    for (int base = 0; base < p.ranks; base += AT_ONCE) {
        float lse[AT_ONCE];
        float4 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            lse[i] = -INF;
            if (base + i >= p.ranks) continue;
            lse[i] = lses[(base + i) * p.lses_rank];
            v[i] = load_values(outs + (base + i) * p.outs_rank, p.aligned);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (fabsf(lse[i]) == INF) continue;
            const float weight = exp2_approx((lse[i] - top) * LOG2E);
            sum += weight;
            o.x += weight * v[i].x;
            o.y += weight * v[i].y;
            o.z += weight * v[i].z;
            o.w += weight * v[i].w;
        }
    }
    const bool empty = top == -INF;
    const float lse = empty ? INF : top + log2_approx(sum) * LN2;
    float factor = empty ? 0.0f : 1.0f / sum;
    if (p.sink != nullptr && !empty) factor /= 1.0f + exp2_approx((p.sink[head] - lse) * LOG2E);
    o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
    store_values(p.out + token * p.out_token + head * p.out_head + column, o, p.aligned);
    if (threadIdx.x == 0) p.lse[token * p.lse_token + head * p.lse_head] = lse;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
