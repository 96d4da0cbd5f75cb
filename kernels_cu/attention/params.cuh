// The parameter struct of the attention kernels.
#pragma once
#include "rows/call_scale.cuh"
#include "rows/paged.cuh"

// cupy_mla/cuda/structs.py declares the same fields.
struct AttentionParams {
    Source main, extra;     // extra.topk is 0 without a second cache
    const bf16* q;          // [b, s_q, h_q, D_QK]
    int64_t q_b, q_s, q_h;  // strides in items, here and below
    bf16* out;              // [b, s_q, h_q, D_V]
    int64_t out_b, out_s, out_h;
    float* lse;         // [b, s_q, h_q] under the strides below
    float* max_logits;  // the same, or null
    int64_t lse_b, lse_s, lse_h;
    float* part_out;        // [num_splits, num_queries, h_q, D_V], if num_splits > 1: partial results for combine.cu
    float* part_lse;        // [num_splits, num_queries, h_q], base 2
    float* part_max;        // the same, or null
    float4* cluster_parts;  // partial results that CTAs exchange (merge.cuh)
    const float* sink;      // [h_q], or null
    float scale_log2;       // sm_scale * log2(e): logits are in base 2
    int32_t s_q, h_q;
    int32_t num_queries;  // b * s_q
    int32_t num_splits;   // splits of a query or of a work item, by the division
    int32_t flags;        // of enum Flag
    int32_t* order;       // [num_queries] the queries, longest lists first (order_queries.cu); null: in their order
    uint64_t* ready;      // [CTAs] states of CTAs that wait for one another (share_partials.cuh, teams.cuh)
    uint64_t nonce;       // a multiple of 4, different in each run
    int32_t least_split;  // shares: least number of pairs of tiles in a split
    int32_t item_cost;    // shares of equally long lists: what a work item costs beside its pairs of tiles
    int32_t cut_cost;     // shares of other lists: what cutting items costs, times all shares
    int32_t whole_items;  // if items stay whole: the largest number in a share, times all shares
    int32_t plan_filled;  // an earlier launch has filled the plan; else this one does
    int4* plan;           // [CTAs] the shares of calls with one schedule (share.cuh), or null
    CallScale q_scale;    // what values of an e4m3 q are multiplied by
    CallScale k_scale;    // layout PLAIN_FP8: what values of rows are multiplied by
};

// What AttentionParams.flags says.
enum Flag {
    ALIGNED_ROWS = 1,  // every row of the caches starts at a multiple of 16 bytes
    ALIGNED_Q = 2,     // every row of q starts at a multiple of 4 bytes
    ALIGNED_OUT = 4,   // every row of out starts at a multiple of 4 bytes
    WIDE_OUT = 8,      // every row of out starts at a multiple of 16 bytes
    SOME_DONE = 16,    // a negative main.lengths: the request has its results already, and is skipped
    DECODE = 32,       // most queries are of different requests, which read different rows
    ALIKE = 64,        // calls share a plan and have equal lengths; shares are first found as if lists were full
    E4M3_Q = 128,      // q is float8_e4m3fn, and its strides count such items. Layout PLAIN_FP8 only
    INVARIANT = 256,   // a request's bits must not depend on the number of requests. For dense_combine.cu only
};

// A query token: its index in the call, its request, its index in the request.
struct Query {
    int index, b, s;
};

__device__ __forceinline__ Query query_of(const AttentionParams& p, int index) {
    return {index, index / p.s_q, index % p.s_q};
}

// The same with a branch that saves the division for s_q 1, for kernels so short that it counts. It takes registers.
__device__ __forceinline__ Query query_by_branch(const AttentionParams& p, int index) {
    return p.s_q == 1 ? Query{index, index, 0} : query_of(p, index);
}

// The query and head that a line of a work item's Q, S and O belongs to.
struct Line {
    Query query;
    int head;  // h_q or more: the line is padding
};

// Whether list lengths are read from memory, where the launch before may have written them.
__device__ __forceinline__ bool has_lengths(const AttentionParams& p) {
    return p.main.lengths != nullptr || p.extra.lengths != nullptr;
}

__device__ __forceinline__ const int32_t* list_of(const Source& source, const Query& query) {
    return source.indices + query.b * source.index_stride_b + query.s * source.index_stride_s;
}

// Item: uint8_t for an e4m3 q.
template <typename Item = bf16>
__device__ __forceinline__ const Item* q_of(const AttentionParams& p, Query query, int head) {
    return reinterpret_cast<const Item*>(p.q) + query.b * p.q_b + query.s * p.q_s + head * p.q_h;
}
__device__ __forceinline__ bf16* out_of(const AttentionParams& p, const Query& query, const int& head,
                                        const int& column = 0) {
    return p.out + query.b * p.out_b + query.s * p.out_s + head * p.out_h + column;
}
