// Of fp8_sm90: the lines of a work item are query tokens and heads of a request, which share its rows. Each token sees
// rows up to an end of its own, or, with a window, the last ones before it.
//
//   rows     first_row                                    last_end - 1
//   tiles    |    0    |    1    |    2    |    3    |    4    |
//   token 0       <-------------------------------------->            `seen`: where they end, of each line
//   token 1            <------------------------------------->
//            SOME       all lines see all                 SOME
//
// The producers mark tiles that not all lines see in full. Only in these the consumers look at each line's end.
#pragma once
#include "attention/fp8_sm90/marks.cuh"

constexpr uint32_t SOME = 4 << WARP_ROWS;  // a mark: not all lines see all rows of the tile

// `line` counts from the request's first one.
__device__ __forceinline__ Line line_at(const AttentionParams& p, const Query& request, int line) {
    return line_of_request(dense(p), request.b, line);
}

// Q of lines of a request, counted from `first_line`.
struct QLines {
    const AttentionParams& p;
    int request, first_line;
    int neighbours;  // lines that stand side by side

    __device__ __forceinline__ QLines(const AttentionParams& p, const Query& request, int first_line)
        : p(p), request(request.b), first_line(first_line) {
        const bool tokens_too = dense(p).tokens == 1 || p.q_s == int64_t(dense(p).heads.value) * D_QK;
        neighbours = p.q_h == D_QK && tokens_too ? GROUP_HEADS : 1;
    }
    __device__ __forceinline__ const bf16* at(int line) const {
        const Line of = line_of_request(dense(p), request, first_line + line);
        return q_of(p, of.query, of.head);
    }
};

// A place in the results of a line.
struct OutAt {
    int request, line, column;

    __device__ __forceinline__ OutAt(const AttentionParams&, const Query& request, int first_line, int line,
                                     int column)
        : request(request.b), line(first_line + line), column(column) {}
    __device__ __forceinline__ bf16* place(const AttentionParams& p) const {
        const Line of = line_of_request(dense(p), request, line);
        return out_of(p, of.query, of.head, column);
    }
    __device__ __forceinline__ void advance(const AttentionParams&, int lines) { line += lines; }
};

// Before the first tile of a split: where the rows end that each line sees, counted from the split's first row.
__device__ __forceinline__ void know_lines(const AttentionParams& p, const Attended& w) {
    if (threadIdx.x >= HEADS) return;
    if (IN_TURN && threadIdx.x == 0) small().step = w.step;
    const int token = divide(w.first_head + int(threadIdx.x), dense(p).heads);
    small().seen[threadIdx.x] = w.last_end - w.first_row - (dense(p).causal ? dense(p).tokens - 1 - token : 0);
}

__device__ __forceinline__ bool all_seen(uint32_t marks) { return (marks & (ALL_VALID | SOME)) == ALL_VALID; }

// Takes out of S^T what lines do not see. `stages`: of the split, before the tile.
__device__ __forceinline__ void mask_rows(const AttentionParams& p, const Role& role, uint32_t stages, uint32_t marks,
                                          float mask, float (&s)[HEADS / 2]) {
    const Role r = rare_role(role);
    const uint32_t window = dense(p).window > 0 ? dense(p).window : 0x7fffffff;
    const int step = IN_TURN ? small().step : 1, first = int(stages) * STAGE_ROWS * step + r.row(0);
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
