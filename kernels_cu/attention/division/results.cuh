// What an attention kernel writes: the output, lse and max_logits of a query, or the partial result of a split.
#pragma once
#include "attention/params.cuh"
#include "rows/items.cuh"
#include "tile/softmax.cuh"

// One head's softmax over some rows, in base 2. No valid row: max and lse are -inf.
struct HeadResult {
    float max, lse;
};

// The factor of the output by an attention sink: 1 / (1 + exp(sink - lse)). A sink of +inf gives 0, of -inf 1.
__device__ __forceinline__ float sink_factor(const AttentionParams& p, int head, float lse2) {
    if (p.sink == nullptr) return 1.0f;
    return 1.0f / (1.0f + exp2_approx(p.sink[head] * LOG2E - lse2));
}

__device__ __forceinline__ void write_statistics(const AttentionParams& p, Query q, int head, HeadResult r) {
    const int64_t at = q.b * p.lse_b + q.s * p.lse_s + head * p.lse_h;
    p.lse[at] = r.lse == -INF ? INF : r.lse * LN2;
    if (p.max_logits != nullptr) p.max_logits[at] = r.max * LN2;
}

// Two neighbouring output values of a head.
__device__ __forceinline__ void write_output(const AttentionParams& p, Query q, int head, int column, float x,
                                             float y) {
    bf16* to = out_of(p, q, head, column);
    const uint32_t packed = pack_items(x, y);
    if (p.flags & ALIGNED_OUT) {
        *reinterpret_cast<uint32_t*>(to) = packed;
    } else {
        to[0] = bf16(packed);
        to[1] = bf16(packed >> 16);
    }
}

// --- a split's partial result, for combine.cu -----------------------------------------------------------------

// Its index in part_lse and part_max, and that of its line in part_out.
template <typename T>
__device__ __forceinline__ int64_t partial_index(const AttentionParams& p, const T& split, const Query& q,
                                                 const int& head) {
    return (int64_t(split) * p.num_queries + q.index) * p.h_q + head;
}

__device__ __forceinline__ void write_partial_statistics(const AttentionParams& p, const int64_t& index,
                                                         HeadResult r) {
    p.part_lse[index] = r.lse;
    if (p.part_max != nullptr) p.part_max[index] = r.max;
}

__device__ __forceinline__ float* partial_out(const AttentionParams& p, const int64_t& index) {
    return p.part_out + index * D_V;
}
