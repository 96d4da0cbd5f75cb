// The parameter of the kernels of dense attention, whose rows come from a block table.
#pragma once
#include "attention/params.cuh"
#include "rows/block_table.cuh"

// cupy_mla/cuda/structs.py declares the same fields. Of the base, `main` has the cache, the requests' lengths
// (main.lengths) and the rows that the table can name for a request (main.topk); it has no lists.
struct DenseParams : AttentionParams {
    BlockTable table;
    int32_t num_blocks;
    int32_t tokens;      // query tokens of a request
    Divisor heads;       // query heads
    int32_t causal;      // a query sees no row behind its own: the queries are the request's last tokens
    int32_t window;      // rows that a query sees at most, the last ones; 0: all
    int32_t num_shares;  // CTAs whose shares stand in `shares`
    int4* shares;        // [num_shares] those of this call, for dense_combine.cu
};

// DENSE: the parameter of the launch.
__device__ __forceinline__ const DenseParams& dense(const AttentionParams& p) {
    return static_cast<const DenseParams&>(p);
}

// What line `line` of a request is: a token and a head.
__device__ __forceinline__ Line line_of_request(const DenseParams& p, int request, int line) {
    const int token = divide(line, p.heads);
    return {{request, request, token}, line < p.h_q ? line - token * int(p.heads.value) : p.h_q};
}

// Rows begin .. end - 1 of a request: those that a query sees and the table can name.
struct Seen {
    int begin, end;
};

__device__ __forceinline__ int length_of_request(const DenseParams& p, int request) {
    return max(p.main.lengths[request], 0);
}
__device__ __forceinline__ Seen seen_of_length(const DenseParams& p, int length, int token) {
    const int end = length - (p.causal ? p.tokens - 1 - token : 0);
    return {p.window > 0 ? max(end - p.window, 0) : 0, min(end, p.main.topk)};
}

// The block that holds a request's row; -1 if the table has no such row. Whether the cache has it is not looked at.
__device__ __forceinline__ int32_t load_block(const DenseParams& p, int request, int32_t row) {
    const int32_t column = find_position(p.table, row).column;
    return column < 0 ? -1 : p.table.blocks[request * p.table.stride + column];
}

// A request's row, of which `block` is what load_block gave. TheRow: the layout's (rows/reader.cuh).
template <typename TheRow>
__device__ __forceinline__ TheRow row_in_block(const DenseParams& p, int32_t block, int32_t row) {
    if (uint32_t(block) >= uint32_t(p.num_blocks)) return TheRow::none();
    const int32_t offset = row - divide(row, p.table.block_size) * int32_t(p.table.block_size.value);
    const uint8_t* start = p.main.cache + block * p.main.block_stride;
    if constexpr (TheRow::QUANTIZED) return TheRow::in_block(start, offset, p.main.block_size);
    return TheRow::in_block(start, offset, p.main.block_size, p.main.row_stride);
}
