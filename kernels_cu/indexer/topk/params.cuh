// Selection of the largest logits: its parameter, and what it says of a row.
#pragma once
#include "indexer/topk/row_range.cuh"
#include "rows/block_table.cuh"

// cupy_mla/cuda/topk.py declares the same fields.
struct TopkParams {
    BlockTable table;         // for slots as results; `blocks` is null for positions
    const void* logits;       // [rows, width]
    const int32_t* starts;    // [rows], or null
    const int32_t* ends;      // [rows]; [rows / queries] or [rows / queries, queries] context lengths; or null
    const int32_t* requests;  // [rows] rows of the table; null: row / queries
    int32_t* out;             // [rows, k]
    int64_t logits_stride, out_stride, lens_stride;  // items
    int32_t rows, width, k;
    int32_t queries;    // of a request: `ends` are context lengths; 0: they are ends
    int32_t aligned;    // rows allow loads of four logits
    int32_t in_blocks;  // columns are those of candidate blocks; `ends` are [rows] numbers of keys
};

// Columns [begin, end) of a row that are looked at. Candidate blocks of 8 keys end where their row does: of a row of as many
// as there is room for, the last one has the row's last keys.
__device__ __forceinline__ Range columns_of_row(const TopkParams& p, int row) {
    Range range = range_of_row(p, row);
    if (p.in_blocks) range.end = min(range.end, p.width - (-p.ends[row] & 7));
    return range;
}

// A request's row of a block table; null: the table has no such request. `requests` are those of the rows, or null.
__device__ __forceinline__ const int32_t* blocks_of_row(const BlockTable& table, const int32_t* requests, int queries,
                                                        int row) {
    const int request = requests == nullptr ? request_of_row(queries, row) : requests[row];
    return has_request(table, request) ? table.blocks + request * table.stride : nullptr;
}
__device__ __forceinline__ const int32_t* blocks_of_row(const TopkParams& p, int row) {
    return blocks_of_row(p.table, p.requests, p.queries, row);
}
