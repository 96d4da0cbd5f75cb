// topk's parameters, and what they say of a row.
#pragma once
#include "indexer/topk/row_range.cuh"
#include "rows/block_table.cuh"

// cupy_mla/cuda/topk.py declares the same fields.
struct TopkParams {
    BlockTable table;         // results are slots by this table; `blocks` null: results are positions
    const void* logits;       // [rows, width]
    const int32_t* starts;    // [rows] where ranges begin; null: at 0
    const int32_t* ends;      // where ranges end (row_range.cuh); null: at `width`
    const int32_t* requests;  // [rows] each row's row of the block table; null: row / queries
    int32_t* out;             // [rows, k]
    int64_t logits_stride, out_stride, lens_stride;  // items
    int32_t rows, width, k;
    int32_t queries;    // of a request: `ends` are context lengths; 0: they are ends
    int32_t aligned;    // rows allow loads of four logits
    int32_t in_blocks;  // columns are those of candidate blocks, and `ends` are [rows] numbers of keys
};

// The columns [begin, end) of a row that take part. A candidate block has 8 columns. A row's last candidate block is
// its request's last block, which may have fewer keys: the columns behind them do not take part. That matters where
// the row fills all of `width`, but has more keys than that.
__device__ __forceinline__ Range columns_of_row(const TopkParams& p, int row) {
    Range range = range_of_row(p, row);
    if (p.in_blocks) range.end = min(range.end, p.width - (-p.ends[row] & 7));
    return range;
}

// A row's row of the block table; null: the table has no such request. `requests` is as in TopkParams.
__device__ __forceinline__ const int32_t* blocks_of_row(const BlockTable& table, const int32_t* requests, int queries,
                                                        int row) {
    const int request = requests == nullptr ? request_of_row(queries, row) : requests[row];
    return has_request(table, request) ? table.blocks + request * table.stride : nullptr;
}
__device__ __forceinline__ const int32_t* blocks_of_row(const TopkParams& p, int row) {
    return blocks_of_row(p.table, p.requests, p.queries, row);
}
