// The parameter struct of dense attention, whose rows come from a block table.
#pragma once
#include "attention/params.cuh"
#include "rows/block_table.cuh"

// cupy_mla/cuda/structs.py declares the same fields. In the base, `main` holds the cache, the requests' lengths
// (main.lengths), and the number of rows that the table can name for a request (main.topk). There are no lists.
struct DenseParams : AttentionParams {
    BlockTable table;
    int32_t num_blocks;
    int32_t tokens;      // query tokens of a request
    Divisor heads;       // query heads
    int32_t causal;      // query tokens are the request's last ones, and see no row after their own
    int32_t window;      // a query token sees at most this many rows, the last ones; 0: all
    int32_t num_shares;  // entries of `shares`
    int4* shares;        // [num_shares] this call's shares, for dense_combine.cu
};

// DENSE: the launch's parameter struct.
__device__ __forceinline__ const DenseParams& dense(const AttentionParams& p) {
    return static_cast<const DenseParams&>(p);
}

// The query token and head of a request's line.
__device__ __forceinline__ Line line_of_request(const DenseParams& p, int request, int line) {
    const int token = divide(line, p.heads);
    return {{request, request, token}, line < p.h_q ? line - token * int(p.heads.value) : p.h_q};
}

// Rows begin .. end - 1 of a request, which a query token sees and the table can name.
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

// Loads the block that holds a request's row; -1 if the table has no such row. The block may lie outside the cache.
__device__ __forceinline__ int32_t load_block(const DenseParams& p, int request, int32_t row) {
    const int32_t column = find_position(p.table, row).column;
    return column < 0 ? -1 : p.table.blocks[request * p.table.stride + column];
}

// A request's row; `block` is the result of load_block. TheRow: the layout's row (rows/reader.cuh).
template <typename TheRow>
__device__ __forceinline__ TheRow row_in_block(const DenseParams& p, int32_t block, int32_t row) {
    if (uint32_t(block) >= uint32_t(p.num_blocks)) return TheRow::none();
    const int32_t offset = row - divide(row, p.table.block_size) * int32_t(p.table.block_size.value);
    const uint8_t* start = p.main.cache + block * p.main.block_stride;
    if constexpr (TheRow::QUANTIZED) return TheRow::in_block(start, offset, p.main.block_size);
    return TheRow::in_block(start, offset, p.main.block_size, p.main.row_stride);
}
