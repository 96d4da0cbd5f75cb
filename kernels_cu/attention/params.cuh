// The parameter of the attention kernels; cupy_mla/cuda/attention.py packs it field by field.
#pragma once
#include "rows/paged.cuh"

struct AttentionParams {
    Source main, extra;    // extra.topk is 0 without a second cache
    const bf16* q;         // [b, s_q, h_q, D_QK]
    int64_t q_b, q_s, q_h;  // strides in items, here and below
    bf16* out;             // [b, s_q, h_q, 512]
    int64_t out_b, out_s, out_h;
    float* lse;            // [b, s_q, h_q] under the strides below
    float* max_logits;     // the same, or null
    int64_t lse_b, lse_s, lse_h;
    float* part_out;       // [num_splits, num_queries, h_q, 512], when num_splits > 1
    float* part_lse;       // [num_splits, num_queries, h_q], base 2
    float* part_max;       // the same, or null
    float4* cluster_parts;  // where the blocks of clusters merge, see cluster_merge.cuh
    const float* sink;     // [h_q], or null
    float scale_log2;      // sm_scale * log2(e): logits are kept in base 2
    int32_t s_q, h_q;
    int32_t num_queries;   // b * s_q
    int32_t num_splits;
    int32_t flags;         // which of the arrays allow wide accesses
    int32_t* order;        // [num_queries] the queries, longest lists first (order_queries.cu), or null: as they come
};

constexpr int ALIGNED_ROWS = 1, ALIGNED_Q = 2, ALIGNED_OUT = 4, WIDE_OUT = 8;  // 16, 4, 4 and 16 bytes
constexpr int SOME_DONE = 16;  // queries whose main.lengths is negative have their results
constexpr int PAIRED_PARTS = 32;  // four values of part_out are columns 128 i + 2 j, + 1, + 64, + 65

// A query token's request and its place in the request's queries.
struct Query {
    int index, b, s;
};

__device__ __forceinline__ Query query_of(const AttentionParams& p, int index) { return {index, index / p.s_q, index % p.s_q}; }

// The same for kernels with so little to do that a division counts, and registers for a branch.
__device__ __forceinline__ Query query_at_once(const AttentionParams& p, int index) {
    return p.s_q == 1 ? Query{index, index, 0} : query_of(p, index);
}
