// Sorts the valid entries of index lists, ascending, for the backward: a row's gradient is then a sum over queries in
// their order, and every query's entries of a range of rows stand side by side.
//
//   grid   x query
//   CTA    256 threads; a radix sort, BITS bits of the row number a pass. Each warp counts the digits of its part of the
//          list, the counts give the entries their places, and it puts them there; entries of a digit stay in order.
//
// The first pass reads the caller's list and leaves out what is no row. The last one writes `rows`, those before write
// `rows` and `spare` in turn.
#include "tile/warp.cuh"

constexpr int BITS = 8, DIGITS = 1 << BITS, THREADS = DIGITS, WARPS = THREADS / 32;

// cupy_mla/cuda/backward.py declares the same fields.
struct BackwardListsParams {
    const int32_t* indices;  // [queries, topk]
    const int32_t* lengths;  // [queries], or null
    int32_t* rows;           // [queries, topk]
    int32_t* spare;          // the same
    int32_t* counts;         // [queries] valid entries
    int32_t* starts;         // [queries, ranges + 1] where each range of RANGE_ROWS rows begins in `rows`
    int64_t index_stride;    // items
    int32_t topk, s_kv, passes, ranges;
};

__shared__ int places[WARPS][DIGITS];
__shared__ int warp_sums[WARPS];

// The lanes whose entries have the same digit as this lane's. (match.any looks at one digit after the other.)
__device__ __forceinline__ uint32_t alike(bool here, int digit) {
    uint32_t lanes = __ballot_sync(~0u, here);
#pragma unroll
    for (int bit = 1; bit < DIGITS; bit *= 2) {
        const uint32_t set = __ballot_sync(~0u, digit & bit);
        lanes &= digit & bit ? set : ~set;
    }
    return lanes;
}

// Calls act(valid, entry, digit) for the entries of this warp's part of a list, all lanes together.
template <typename Do>
__device__ __forceinline__ void for_each_entry(const int32_t* list, int count, int s_kv, int shift, Do act) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int share = ceil_div(ceil_div(count, WARPS), 32) * 32;
#pragma unroll 1
    for (int at = warp * share + lane; at - lane < min(count, (warp + 1) * share); at += 32) {
        const int entry = at < count ? list[at] : -1;
        act(uint32_t(entry) < uint32_t(s_kv), entry, entry >> shift & (DIGITS - 1));
    }
}

// One pass over `count` entries; returns how many are valid.
__device__ __forceinline__ int sort_by_digit(const int32_t* from, int count, int s_kv, int shift, int32_t* to) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int digit = lane; digit < DIGITS; digit += 32) places[warp][digit] = 0;
    __syncwarp();
    for_each_entry(from, count, s_kv, shift, [&](bool valid, int, int digit) {
        if (valid) atomicAdd(&places[warp][digit], 1);
    });
    __syncthreads();
    int of_digit = 0, total;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) of_digit += places[w][threadIdx.x];
    int place = cta_sum_before(of_digit, warp_sums, total);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const int here = places[w][threadIdx.x];
        places[w][threadIdx.x] = place;
        place += here;
    }
    __syncthreads();
    for_each_entry(from, count, s_kv, shift, [&](bool valid, int entry, int digit) {
        const uint32_t same = alike(valid, digit), earlier = same & ((1u << lane) - 1);
        const int first = places[warp][digit];
        __syncwarp();
        if (valid && earlier == 0) places[warp][digit] = first + __popc(same);
        if (valid) to[first + __popc(earlier)] = entry;
        __syncwarp();
    });
    __syncthreads();
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) backward_lists(const __grid_constant__ BackwardListsParams p) {
    const int query = blockIdx.x;
    int32_t *rows = p.rows + int64_t(query) * p.topk, *spare = p.spare + int64_t(query) * p.topk;
    const int length = p.lengths == nullptr ? p.topk : max(0, min(p.lengths[query], p.topk));
    const int32_t* list = p.indices + query * p.index_stride;
    int count = length;
#pragma unroll 1
    for (int pass = 0; pass < p.passes; ++pass) {
        int32_t* next = (p.passes - pass) % 2 == 1 ? rows : spare;
        count = sort_by_digit(list, count, p.s_kv, BITS * pass, next);
        list = next;
    }
    if (threadIdx.x == 0) p.counts[query] = count;
    int32_t* starts = p.starts + int64_t(query) * (p.ranges + 1);
#pragma unroll 1
    for (int range = threadIdx.x; range <= p.ranges; range += THREADS) {
        int first = 0, end = count;  // by bisection: entries before `first` lie below the range
        while (first < end) {
            const int middle = (first + end) / 2;
            if (rows[middle] / RANGE_ROWS < range) {
                first = middle + 1;
            } else {
                end = middle;
            }
        }
        starts[range] = first;
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
