// Prefill of few heads: neighbouring queries as one tile of 64 heads, over the union of their index lists.
// cupy_mla/cuda/prefill_sm90.py packs what follows AttentionParams field by field.
#pragma once
#include "attention/params.cuh"

// Group g has queries g * queries, ... of the call. In the base, main.lengths is `left`.
struct GroupedParams : AttentionParams {
    const int32_t* list_lengths;  // [num_queries], or null
    int32_t* rows;                // [num_groups, capacity] the union of the lists; a row listed more than twice again and again
    uint8_t* excluded;            // [num_groups, capacity] bit q: query q of the group does not list the row
    uint64_t* twice;              // [num_groups, tile, queries] bit i: the i-th of 64 rows counts as two
    int32_t* group_lengths;       // [num_groups] rows of the union; 0: the group's queries are left to another kernel
    int32_t* left;                // [num_queries] entries of a list for the other kernel, -1 where there is nothing to do
    int32_t queries;              // of a group; queries * h_q <= 64
    int32_t first_group, num_groups;  // of this launch; `rows` to `group_lengths` begin with its first
    int32_t capacity;             // queries * topk
    int32_t twice_capacity;       // ceil(capacity / 64) * queries
    float most;                   // a group is left where its union has more rows than this share of its lists
};

__device__ __forceinline__ int call_length(const GroupedParams& p, int query) {
    return p.list_lengths == nullptr ? p.main.topk : max(0, min(p.list_lengths[query], p.main.topk));
}

__device__ __forceinline__ int num_tiles(int rows) { return ceil_div(rows, TILE_ROWS); }
