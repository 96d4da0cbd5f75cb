// Part of fp8_sm90, dense attention: a work item's lines are query tokens times heads of one request, which share its
// rows. A causal token sees rows up to an end of its own; with a window only the last ones before that end.
//
//   rows     first_row                                    last_end - 1
//   tiles    |    0    |    1    |    2    |    3    |    4    |
//   token 0       <-------------------------------------->            small().seen: the end of each line's rows
//   token 1            <------------------------------------->
//            SOME       all lines see all                 SOME
//
// The producers mark tiles of which some lines do not see every row (SOME). Only in these the consumers compare rows
// with each line's end.
#pragma once
#include "attention/fp8_sm90/marks.cuh"

constexpr uint32_t SOME = 4 << WARP_ROWS;  // a mark: some line does not see every row of the tile

// The query token and the head of a request's line `line`.
__device__ __forceinline__ Query query_at(const AttentionParams& p, const Query& request, int line) {
    return line_of_request(dense(p), request.b, line).query;
}
__device__ __forceinline__ int head_at(const AttentionParams& p, int line) {
    return line_of_request(dense(p), 0, line).head;
}

// A line of a request.
struct LineOf {
    int request, line;
};

// Where Q of an item's first line is, and that of a line `lines` further on; and how many lines at most are
// contiguous, so that one bulk copy brings them.
using FirstQ = LineOf;
__device__ __forceinline__ FirstQ first_q(const AttentionParams&, const Query& request, int line) {
    return {request.b, line};
}
__device__ __forceinline__ const uint8_t* further_q(const AttentionParams& p, const FirstQ& q, int lines) {
    const Line of = line_of_request(dense(p), q.request, q.line + lines);
    const int64_t item = of.query.b * p.q_b + of.query.s * p.q_s + of.head * p.q_h;
    return reinterpret_cast<const uint8_t*>(p.q) + item * (bytes_of_q(p) / D_QK);
}
__device__ __forceinline__ int contiguous_lines(const AttentionParams& p) {
    const bool tokens_too = dense(p).tokens == 1 || p.q_s == int64_t(dense(p).heads.value) * D_QK;
    return p.q_h == D_QK && tokens_too ? GROUP_HEADS : 1;
}

// A place in the output. further_out moves it by lines and columns; place_of_out is its address.
struct OutAt {
    int request, line, column;
};
__device__ __forceinline__ OutAt first_out(const AttentionParams&, const Query& request, int line) {
    return {request.b, line, 0};
}
__device__ __forceinline__ OutAt further_out(const AttentionParams&, const OutAt& out, int lines, int columns) {
    return {out.request, out.line + lines, out.column + columns};
}
__device__ __forceinline__ bf16* place_of_out(const AttentionParams& p, const OutAt& out) {
    const Line of = line_of_request(dense(p), out.request, out.line);
    return out_of(p, of.query, of.head, out.column);
}

// Called before the first tile of a split: stores where the rows end that each line sees, counted from the split's
// first row.
__device__ __forceinline__ void prepare_masks(const AttentionParams& p, const TurnInfo& w) {
    if (threadIdx.x >= HEADS) return;
    if (INTERLEAVED && threadIdx.x == 0) small().step = w.step;
    const int token = divide(w.first_head + int(threadIdx.x), dense(p).heads);
    small().seen[threadIdx.x] = w.last_end - w.first_row - (dense(p).causal ? dense(p).tokens - 1 - token : 0);
}

__device__ __forceinline__ bool all_rows_visible(uint32_t marks) { return (marks & (ALL_VALID | SOME)) == ALL_VALID; }

// Masks S^T where a row is not valid or its line does not see it. `stages`: the split's stages before the tile.
__device__ __forceinline__ void mask_rows(const AttentionParams& p, const Role& role, uint32_t stages, uint32_t marks,
                                          float mask, float (&s)[HEADS / 2]) {
    const Role r = rare_role(role);
    const uint32_t window = dense(p).window > 0 ? dense(p).window : 0x7fffffff;
    const int step = INTERLEAVED ? small().step : 1, first = int(stages) * STAGE_ROWS * step + r.row(0);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const int seen = small().seen[r.head(c)] - first;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool valid = marks >> valid_bit(r.g + 8 * i) & 1;
            if (!valid || uint32_t(seen - 8 * i - 1) >= window) s[element(i, c)] = mask;
        }
    }
}
