// Dense attention: a query token sees rows of its request from the first on, which stand where the block table says.
#pragma once
#include "attention/params.cuh"
#include "rows/block_table.cuh"

// In the base, main.lengths are the requests' lengths, and main.topk is how many rows the table can name for a request.
// cupy_mla/cuda/structs.py declares the same fields.
struct DenseParams : AttentionParams {
    BlockTable table;
    int32_t num_blocks;
    int32_t tokens, heads;  // of a request
    int32_t causal;         // token i of a request sees tokens - 1 - i rows less than the last
    int32_t window;         // a token sees the last so many of its rows; 0: all
};

// The positions that a query token sees: begin .. end - 1.
struct Sight {
    int begin, end;
};

__device__ __forceinline__ Sight sight_of(const DenseParams& p, int length, int token) {
    const int end = p.causal ? length - p.tokens + 1 + token : length;
    return {p.window > 0 ? max(0, end - p.window) : 0, end};
}

// The slot of a request's position; -1: the cache has none.
__device__ __forceinline__ int32_t slot_of(const DenseParams& p, int request, int position) {
    const Position at = find_position(p.table, position);
    if (at.column < 0) return -1;
    return slot_in_block(p.table, p.table.blocks[request * p.table.stride + at.column], at.offset);
}
