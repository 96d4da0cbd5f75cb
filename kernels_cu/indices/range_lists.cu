// Writes each token's range of rows in the form in which backward_lists.cu leaves index lists: sorted entries, and
// where in them each block of RANGE_ROWS rows begins.
//
//   one CTA   a token
#include "ptx/types.cuh"

constexpr int THREADS = 256;

// cupy_mla/cuda/row_sums.py declares the same fields.
struct RangeListsParams {
    const int32_t* first;    // [tokens] the first row of the token's range
    const int32_t* end;      // [tokens] the row behind the last one
    const uint8_t* counted;  // [tokens] whether the token's rows count, or null
    int32_t* rows;           // [tokens, s_kv]
    int32_t* places;         // [tokens, s_kv] entries' places, which are the rows themselves
    int32_t* counts;         // [tokens]
    int32_t* starts;         // [tokens, ranges + 1]
    int32_t s_kv, ranges;
};

extern "C" __global__ void __launch_bounds__(THREADS) range_lists(const __grid_constant__ RangeListsParams p) {
    const int token = blockIdx.x, first = max(p.first[token], 0), end = min(p.end[token], p.s_kv);
    const bool counts = p.counted == nullptr || p.counted[token] != 0;
    const int count = counts ? max(end - first, 0) : 0;
    const int64_t to = int64_t(token) * p.s_kv;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        p.rows[to + i] = first + i;
        p.places[to + i] = first + i;
    }
    int32_t* starts = p.starts + int64_t(token) * (p.ranges + 1);
    for (int range = threadIdx.x; range <= p.ranges; range += THREADS)
        starts[range] = min(max(range * RANGE_ROWS - first, 0), count);
    if (threadIdx.x == 0) p.counts[token] = count;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
