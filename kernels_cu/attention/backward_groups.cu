// Makes the union of the lists of neighbouring queries, a group, for a backward that works on all of them at once. It
// takes what backward_lists.cu made, and leaves the same of the unions: sorted entries, and where each range of rows
// begins. Beside each entry stands which queries list it.
//
//   grid   x group of `tokens` queries, counted from the chunk's first
//   CTA    256 threads, a range of rows each, and then the next 256 ranges. A thread merges the parts of the lists
//          that are in its range, twice: it counts the rows, and once all threads know where theirs begin, writes them.
//
// A row that a query lists n times comes n times. The union stands where the list of the group's first query begins,
// and goes on over those of the others, whose count is OF_ITEM_BEFORE.
//
// A product multiplies all queries of a group with a row, with a weight of 0 where it is not listed. That adds 0 if all
// is finite. So a group with a value that is not finite, in a query or in a row that is listed, is left as single
// queries. So is one that has a query without rows.
#include "tile/contributions.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 256;
constexpr int NO_ROW = 0x7fffffff;

// cupy_mla/cuda/query_groups.py declares the same fields.
struct BackwardGroupsParams {
    const int32_t* rows;                    // [queries, topk], ascending
    const int32_t* counts;                  // [queries]
    const int32_t* starts;                  // [queries, ranges + 1]
    const uint8_t* finite_queries;          // [queries] whether all their values are finite
    const uint8_t* finite_rows;             // [s_kv]
    int32_t* united;                        // [queries, topk] entries of the unions
    uint8_t* listed;                        // the same shape, bit n: query n of the group lists the row
    int32_t* united_counts;                 // [queries] entries of a union, or OF_ITEM_BEFORE
    int32_t* united_starts;                 // [queries, ranges + 1]
    int32_t queries, tokens, topk, ranges;  // tokens: queries of a group, at most MOST
};

__shared__ int warp_sums[THREADS / 32];

// Queries `first` .. + `count` - 1.
struct Group {
    int first, count;
};

// Whether the group's queries may be worked on together.
__device__ __forceinline__ bool fit_together(const BackwardGroupsParams& p, const Group& g) {
    bool fit = true;
    for (int query = g.first; query < g.first + g.count; ++query) {
        fit &= p.finite_queries[query] != 0 && p.counts[query] > 0;
        for (int i = threadIdx.x; i < p.counts[query]; i += THREADS)
            fit &= p.finite_rows[p.rows[int64_t(query) * p.topk + i]] != 0;
    }
    return __syncthreads_and(fit);
}

// Calls act(n, row, listed) for the n-th row of the union in a range. Returns how many there are.
template <typename Do>
__device__ __forceinline__ int merge(const BackwardGroupsParams& p, const Group& g, int range, Do act) {
    const int32_t *at[MOST], *end[MOST];
    int next[MOST];
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        at[i] = end[i] = nullptr;
        if (i < g.count && range < p.ranges) {
            const int32_t* starts = p.starts + int64_t(g.first + i) * (p.ranges + 1) + range;
            const int32_t* rows = p.rows + int64_t(g.first + i) * p.topk;
            at[i] = rows + starts[0], end[i] = rows + starts[1];
        }
        next[i] = at[i] < end[i] ? *at[i] : NO_ROW;
    }
#pragma unroll 1
    for (int n = 0;; ++n) {
        int row = NO_ROW;
#pragma unroll
        for (int i = 0; i < MOST; ++i) row = min(row, next[i]);
        if (row == NO_ROW) return n;
        uint32_t listed = 0;
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            if (next[i] != row) continue;
            listed |= 1u << i;
            next[i] = ++at[i] < end[i] ? *at[i] : NO_ROW;
        }
        act(n, row, listed);
    }
}

__device__ __forceinline__ void unite(const BackwardGroupsParams& p, const Group& g) {
    const int64_t to = int64_t(g.first) * p.topk;
    int32_t* starts = p.united_starts + int64_t(g.first) * (p.ranges + 1);
    int count = 0;
#pragma unroll 1
    for (int base = 0; base <= p.ranges; base += THREADS) {
        const int range = base + threadIdx.x;
        int total;
        const int here = merge(p, g, range, [](int, int, uint32_t) {});
        const int begin = count + cta_sum_before(here, warp_sums, total);
        if (range <= p.ranges) starts[range] = begin;
        merge(p, g, range, [&](int n, int row, uint32_t listed) {
            p.united[to + begin + n] = row;
            p.listed[to + begin + n] = listed;
        });
        count += total;
        __syncthreads();  // warp_sums are read before they are written again
    }
    if (threadIdx.x < g.count) p.united_counts[g.first + threadIdx.x] = threadIdx.x == 0 ? count : OF_ITEM_BEFORE;
    for (int i = p.ranges + 1 + threadIdx.x; i < g.count * (p.ranges + 1); i += THREADS) starts[i] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) backward_groups(const __grid_constant__ BackwardGroupsParams p) {
    const int first = blockIdx.x * p.tokens, queries = min(p.tokens, p.queries - first);
    const int together = fit_together(p, {first, queries}) ? queries : 1;
#pragma unroll 1
    for (int i = 0; i < queries; i += together) unite(p, {first + i, together});
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
