// What remains when a softmax over all rows is done: lse, max_logits, the sink, and the output's rounding.
#pragma once
#include "attention/params.cuh"
#include "ptx/convert.cuh"

// 2^(from - to), where -inf stands for "nothing yet": what a new reference makes of what is relative to an old one.
__device__ __forceinline__ float factor(float from, float to) { return exp2_approx(from - (to == -INF ? 0.0f : to)); }

// One head's softmax over some rows, in base 2. No valid row: max and lse are -inf.
struct HeadResult {
    float max, lse;
};

// Factor of an attention sink on the output: 1 / (1 + exp(sink - lse)); +inf gives 0, -inf gives 1.
__device__ __forceinline__ float sink_factor(const AttentionParams& p, int head, float lse2) {
    if (p.sink == nullptr) return 1.0f;
    return 1.0f / (1.0f + exp2_approx(p.sink[head] * LOG2E - lse2));
}

__device__ __forceinline__ void write_statistics(const AttentionParams& p, Query q, int head, HeadResult r) {
    const int64_t at = q.b * p.lse_b + q.s * p.lse_s + head * p.lse_h;
    p.lse[at] = r.lse == -INF ? INF : r.lse * LN2;
    if (p.max_logits != nullptr) p.max_logits[at] = r.max * LN2;
}

// Two neighbouring output values of one head.
__device__ __forceinline__ void write_output(const AttentionParams& p, Query q, int head, int column, float x, float y) {
    bf16* to = p.out + q.b * p.out_b + q.s * p.out_s + head * p.out_h + column;
    const uint32_t packed = pack_bf16x2(x, y);
    if (p.flags & ALIGNED_OUT) {
        *reinterpret_cast<uint32_t*>(to) = packed;
    } else {
        to[0] = bf16(packed);
        to[1] = bf16(packed >> 16);
    }
}
