// Query groups: the heads of neighbouring queries are one tile of 64 lines, over the union of the queries' index
// lists.
#pragma once
#include "attention/params.cuh"

// Query group n has queries n * queries, ... of the call. In the base, main.lengths is `left`.
struct GroupedParams : AttentionParams {
    const int32_t* list_lengths;  // [num_queries], or null
    // [num_groups, capacity] the union; a row listed more than twice comes several times.
    int32_t* rows;
    uint8_t* excluded;                // [num_groups, capacity] bit q: query q of the group does not list the row
    uint64_t* twice;                  // [num_groups, tile, queries] bit i: row i of the tile counts twice
    int32_t* group_lengths;           // [num_groups] rows of the union; 0: the queries are left to another kernel
    int32_t* left;                    // [num_queries] list length for the other kernel; -1: the query has its results
    int32_t queries;                  // of a group; queries * h_q <= 64
    int32_t first_group, num_groups;  // of this launch; `rows` to `group_lengths` begin with its first
    int32_t capacity;                 // queries * topk
    int32_t twice_capacity;           // ceil(capacity / 64) * queries
    float most;                       // a group is left if its union has more rows than this share of its list entries
};

__device__ __forceinline__ int call_length(const GroupedParams& p, int query) {
    return p.list_lengths == nullptr ? p.main.topk : max(0, min(p.list_lengths[query], p.main.topk));
}

__device__ __forceinline__ int num_tiles(int rows) { return ceil_div(rows, TILE_ROWS); }
