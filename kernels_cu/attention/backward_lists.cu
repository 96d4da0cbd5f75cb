// Sorts the valid entries of index lists in ascending order, for the backward. Then all entries of a query in a range
// of rows are neighbours, and a row's gradient can be summed in the order of the queries.
//
//   grid   x query
//   CTA    256 threads; a radix sort with BITS bits of the row number a pass. Each warp counts the digits of its part
//          of the list. The counts give the entries their places, and the warp stores them there. Entries of a digit
//          keep their order.
//
// The first pass reads the caller's list and drops invalid entries. The last pass writes `rows`; earlier passes write
// `rows` and `spare` alternately. PLACES: each entry carries its place in the caller's list.
#include "tile/warp.cuh"

constexpr int BITS = 8, DIGITS = 1 << BITS, THREADS = DIGITS, WARPS = THREADS / 32;

// cupy_mla/cuda/row_sums.py declares the same fields.
struct BackwardListsParams {
    const int32_t* indices;  // [queries, topk]
    const int32_t* lengths;  // [queries], or null
    const uint8_t* counted;  // [queries] whether the query's entries count, or null
    int32_t* rows;           // [queries, topk]
    int32_t* spare;          // the same
    int32_t* places;         // [queries, topk] each entry's place in the caller's list; with PLACES
    int32_t* spare_places;   // the same
    int32_t* counts;         // [queries] valid entries
    int32_t* starts;         // [queries, ranges + 1] where each range of RANGE_ROWS rows begins in `rows`
    int64_t index_stride;    // items
    int32_t topk, s_kv, passes, ranges;
};

__shared__ int firsts[WARPS][DIGITS];  // counts, then next places, of a warp's entries of each digit
__shared__ int warp_sums[WARPS];

// Calls act(valid, entry, index, digit) for the entries of this warp's part of a list, all lanes together.
template <typename Do>
__device__ __forceinline__ void for_each_entry(const int32_t* list, int count, int s_kv, int shift, Do act) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int share = ceil_div(ceil_div(count, WARPS), 32) * 32;
#pragma unroll 1
    for (int at = warp * share + lane; at - lane < min(count, (warp + 1) * share); at += 32) {
        const int entry = at < count ? list[at] : -1;
        act(uint32_t(entry) < uint32_t(s_kv), entry, at, entry >> shift & (DIGITS - 1));
    }
}

// Entries and their places in the caller's list. `places` null: the entries are the caller's list.
struct List {
    const int32_t *entries, *places;
};
struct Sorted {
    int32_t *entries, *places;
};

// One pass over `count` entries. Returns how many are valid.
__device__ __forceinline__ int sort_by_digit(const List& from, int count, int s_kv, int shift, const Sorted& to) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int digit = lane; digit < DIGITS; digit += 32) firsts[warp][digit] = 0;
    __syncwarp();
    for_each_entry(from.entries, count, s_kv, shift, [&](bool valid, int, int, int digit) {
        if (valid) atomicAdd(&firsts[warp][digit], 1);
    });
    __syncthreads();
    int of_digit = 0, total;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) of_digit += firsts[w][threadIdx.x];
    int place = cta_sum_before(of_digit, warp_sums, total);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const int here = firsts[w][threadIdx.x];
        firsts[w][threadIdx.x] = place;
        place += here;
    }
    __syncthreads();
    for_each_entry(from.entries, count, s_kv, shift, [&](bool valid, int entry, int at, int digit) {
        const uint32_t same = lanes_with_same<DIGITS>(valid, digit), earlier = same & ((1u << lane) - 1);
        const int first = firsts[warp][digit];
        __syncwarp();
        if (valid && earlier == 0) firsts[warp][digit] = first + __popc(same);
        if (valid) {
            to.entries[first + __popc(earlier)] = entry;
            if constexpr (PLACES) to.places[first + __popc(earlier)] = from.places == nullptr ? at : from.places[at];
        }
        __syncwarp();
    });
    __syncthreads();
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) backward_lists(const __grid_constant__ BackwardListsParams p) {
    const int query = blockIdx.x;
    const int64_t from = int64_t(query) * p.topk;
    const Sorted rows = {p.rows + from, p.places + from}, spare = {p.spare + from, p.spare_places + from};
    List list = {p.indices + query * p.index_stride, nullptr};
    int count = p.lengths == nullptr ? p.topk : max(0, min(p.lengths[query], p.topk));
    if (p.counted != nullptr && p.counted[query] == 0) count = 0;
#pragma unroll 1
    for (int pass = 0; pass < p.passes; ++pass) {
        const Sorted next = (p.passes - pass) % 2 == 1 ? rows : spare;
        count = sort_by_digit(list, count, p.s_kv, BITS * pass, next);
        list = {next.entries, next.places};
    }
    if (threadIdx.x == 0) p.counts[query] = count;
    int32_t* starts = p.starts + int64_t(query) * (p.ranges + 1);
    const int first = count > 0 ? rows.entries[0] / RANGE_ROWS : p.ranges;
    const int last = count > 0 ? rows.entries[count - 1] / RANGE_ROWS : p.ranges;
    for (int range = threadIdx.x; range <= p.ranges; range += THREADS)
        if (range <= first || range > last) starts[range] = range <= first ? 0 : count;
    // Ranges between the first entry's and the last one's: each begins at the first entry whose row is in it or behind
    // it.
    for (int at = threadIdx.x + 1; at < count; at += THREADS)
        for (int range = rows.entries[at - 1] / RANGE_ROWS + 1; range <= rows.entries[at] / RANGE_ROWS; ++range)
            starts[range] = at;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
