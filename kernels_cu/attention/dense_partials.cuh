// What the CTAs of dense_sm90.cu leave to dense_combine.cu: their shares, and a partial result of each item that is not
// all theirs.
#pragma once
#include "attention/dense_rows.cuh"
#include "attention/division/shares.cuh"

// The partial result that a share leaves of an item: it has one place for the item with which it ends, one for that with
// which it begins. Where each item has splits of its own, a share is of one item.
__device__ __forceinline__ PartialResults<8> partial_of(const DenseParams& p, int share, bool is_last_item) {
    return {p.cluster_parts, p.num_splits > 1 ? share : 2 * share + !is_last_item};
}
