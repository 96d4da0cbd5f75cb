// The query tokens of a batch: their requests, and their positions in the requests' sequences.
#pragma once
#include "ptx/types.cuh"

// cupy_mla/cuda/structs.py declares the same fields.
struct Queries {
    const int32_t* starts;    // [num_requests + 1] first token of each request
    const int32_t* seq_lens;  // [num_requests]
    int32_t num_requests;
    int32_t num_tokens;
};

// The request of a token; tokens are numbered as in `starts`. -1: no request has the token.
__device__ __forceinline__ int32_t request_of(const Queries& q, int32_t token) {
    int32_t low = 0, high = q.num_requests + 1;  // starts[low - 1] <= token < starts[high]
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (q.starts[middle] <= token)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1 < q.num_requests ? low - 1 : -1;
}

// The position of a request's token in the request's sequence, which ends with the query tokens. -1: it has none.
__device__ __forceinline__ int32_t position_of(const Queries& q, int32_t request, int32_t token) {
    if (uint32_t(request) >= uint32_t(q.num_requests)) return -1;
    const int64_t position = int64_t(q.seq_lens[request]) - q.starts[request + 1] + token;
    return position >= 0 && position <= 0x7fffffff ? int32_t(position) : -1;
}
