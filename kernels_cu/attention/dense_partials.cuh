// What the CTAs of dense_sm90.cu leave to dense_combine.cu: their shares, and a partial result of each item that is not
// all theirs.
#pragma once
#include "attention/bf16_partials.cuh"
#include "attention/dense.cuh"
#include "attention/division/shares.cuh"

// What line `line` of a request is: a token and a head. Lines are tokens times heads, 64 a work item.
__device__ __forceinline__ Line line_of_request(const DenseParams& p, int request, int line) {
    const int token = line / p.heads;
    return {{request, request, token}, line < p.h_q ? line - token * p.heads : p.h_q};
}

// The partial result that a share leaves of an item: it has one place for the item with which it ends, one for that with
// which it begins. Where each item has splits of its own, a share is of one item.
__device__ __forceinline__ PartialResults<8> partial_of(const DenseParams& p, int share, bool is_last_item) {
    return {p.cluster_parts, p.num_splits > 1 ? share : 2 * share + !is_last_item};
}
