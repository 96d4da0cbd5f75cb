// Part of fp8_sm90, index lists: a work item's lines are heads of one query, so all lines see the same rows.
// request_lines.cuh has the same functions for dense attention.
#pragma once
#include "attention/fp8_sm90/marks.cuh"

// The query token and the head of line `line`.
__device__ __forceinline__ const Query& query_at(const AttentionParams&, const Query& query, int) { return query; }
__device__ __forceinline__ const int& head_at(const AttentionParams&, const int& line) { return line; }

// Steps through an e4m3 q, whose strides are in bytes.
__device__ __forceinline__ const bf16* in_bytes(const bf16* q, int64_t bytes) {
    return reinterpret_cast<const bf16*>(reinterpret_cast<const uint8_t*>(q) + bytes);
}

// Where Q of an item's first line is, and that of a line `lines` further on; and how many lines at most are
// contiguous, so that one bulk copy brings them.
using FirstQ = const bf16*;
__device__ __forceinline__ FirstQ first_q(const AttentionParams& p, const Query& query, int line) {
    const bf16* q = q_of(p, query, line);
    return has_e4m3_q(p) ? in_bytes(p.q, q - p.q) : q;
}
__device__ __forceinline__ const bf16* further_q(const AttentionParams& p, const FirstQ& q, int lines) {
    return has_e4m3_q(p) ? in_bytes(q, lines * p.q_h) : q + lines * p.q_h;
}
__device__ __forceinline__ int contiguous_lines(const AttentionParams& p) { return p.q_h == D_QK ? GROUP_HEADS : 1; }

// A place in the output. further_out moves it by lines and columns.
using OutAt = bf16*;
__device__ __forceinline__ OutAt first_out(const AttentionParams& p, const Query& query, int line) {
    return out_of(p, query, line);
}
__device__ __forceinline__ OutAt further_out(const AttentionParams& p, const OutAt& out, int lines, int columns) {
    return out + lines * p.out_h + columns;
}
__device__ __forceinline__ bf16* place_of_out(const AttentionParams&, const OutAt& out) { return out; }

// Called before the first tile of a split. A mask needs nothing but the marks here.
__device__ __forceinline__ void prepare_masks(const AttentionParams&, const TurnInfo&) {}

__device__ __forceinline__ bool all_rows_visible(uint32_t marks) { return (marks & ALL_VALID) == ALL_VALID; }

// Masks S^T in rows that are not valid.
__device__ __forceinline__ void mask_rows(const AttentionParams&, const Role& r, uint32_t, uint32_t marks, float mask,
                                          float (&s)[HEADS / 2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (marks >> valid_bit(r.g + 8 * i) & 1) continue;
#pragma unroll
        for (int c = 0; c < OWN_HEADS; ++c) s[element(i, c)] = mask;
    }
}
