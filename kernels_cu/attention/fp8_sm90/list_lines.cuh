// Of fp8_sm90: the lines of a work item are heads of a query. They all see the rows that its lists name.
#pragma once
#include "attention/fp8_sm90/marks.cuh"

__device__ __forceinline__ Line line_at(const AttentionParams&, const Query& query, int line) { return {query, line}; }

// Q of lines of a query, counted from `first_line`.
struct QLines {
    const bf16* first;
    int64_t step;
    int neighbours;  // lines that stand side by side

    __device__ __forceinline__ QLines(const AttentionParams& p, const Query& query, int first_line)
        : first(q_of(p, query, first_line)), step(p.q_h), neighbours(p.q_h == D_QK ? GROUP_HEADS : 1) {}
    __device__ __forceinline__ const bf16* at(int line) const { return first + line * step; }
};

// A place in the results of a line.
struct OutAt {
    bf16* to;

    __device__ __forceinline__ OutAt(const AttentionParams& p, const Query& query, int first_line, int line,
                                     int column)
        : to(out_of(p, query, first_line) + line * p.out_h + column) {}
    __device__ __forceinline__ bf16* place(const AttentionParams&) const { return to; }
    __device__ __forceinline__ void advance(const AttentionParams& p, int lines) { to += lines * p.out_h; }
};

// Before the first tile of a split: nothing is to be known.
__device__ __forceinline__ void know_lines(const AttentionParams&, const Attended&) {}

__device__ __forceinline__ bool all_seen(uint32_t marks) { return (marks & ALL_VALID) == ALL_VALID; }

// Takes rows out of S^T that are not valid.
__device__ __forceinline__ void mask_rows(const AttentionParams&, const Role& r, uint32_t, uint32_t marks, float mask,
                                          float (&s)[HEADS / 2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (marks >> valid_bit(r.g + 8 * i) & 1) continue;
#pragma unroll
        for (int c = 0; c < OWN_HEADS; ++c) s[element(i, c)] = mask;
    }
}
