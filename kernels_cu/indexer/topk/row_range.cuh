// The range of a row of logits that takes part.
#pragma once
#include "tile/warp.cuh"

struct Range {
    int begin, end;
};

// The request of a row where no array tells it: each request has `queries` rows.
__device__ __forceinline__ int request_of_row(int queries, int row) {
    return queries <= 1 ? row : uint32_t(row) / uint32_t(queries);
}

// `Params` has starts, ends, queries, lens_stride and width. What `ends` is:
//
//   queries == 0                  [rows] where each range ends
//   queries > 0, lens_stride > 0  [rows / queries, queries] context lengths, one a query
//   queries > 0, lens_stride == 0 [rows / queries] context lengths, of a request's last query; each query before it
//                                 sees one key less
template <typename Params>
__device__ __forceinline__ Range range_of_row(const Params& p, int row) {
    int begin = p.starts == nullptr ? 0 : max(p.starts[row], 0), end = p.width;
    if (p.ends != nullptr) {
        if (p.queries == 0) {
            end = p.ends[row];
        } else {
            const int request = request_of_row(p.queries, row), query = row - request * p.queries;
            end =
                p.lens_stride == 0 ? p.ends[request] - p.queries + query + 1 : p.ends[request * p.lens_stride + query];
        }
    }
    begin = min(begin, p.width);
    return {begin, max(begin, min(end, p.width))};
}
