// The k largest of the logits that several ranks found for a query token, exact: of equal ones those at lower positions,
// ascending by position.
//
// An item's *key* is an integer that is larger the earlier it is chosen: its logit's order (1 for NaN, equal for both
// zeros) above its position's complement. The key of an entry that is none is 0.
//
//   CTA        a token: 512 threads. The items are read from L2 again in each step; there are at most k of each rank
//   threshold  the key of the k-th largest by radix: a histogram of its upper 11 bits, then of 11 more of the items that
//              agree so far, and so on: six at most, mostly three, until all items of the bin are chosen
//   collect    chosen positions into shared memory, larger keys first, at places that atomics give
//   sort       by position, bitonic, so that results do not depend on timing
//
// Shared memory (static): 16 KB of positions, 8 KB of bins, and a few words a warp.
#include "ptx/arithmetic.cuh"
#include "tile/warp.cuh"

// cupy_mla/cuda/structs.py declares the same fields.
struct MergeTopkParams {
    const float* values;                                                             // [ranks, tokens, width]
    const int32_t* positions;                                                        // [ranks, tokens, width]
    int32_t* out;                                                                    // [tokens, k]
    int64_t values_rank, values_token, positions_rank, positions_token, out_stride;  // items
    int32_t ranks, width, k;
    int32_t unused;
};

constexpr int THREADS = 512, WARPS = THREADS / 32, MAX_K = 4096;
constexpr int DIGIT = 11, BINS = 1 << DIGIT, BINS_OF_THREAD = BINS / THREADS;  // bits, bins
constexpr int32_t LAST = 0x7fffffff;                                           // not before any position
static_assert(BINS_OF_THREAD * THREADS == BINS, "");

__shared__ int32_t positions[MAX_K];
__shared__ uint32_t bins[BINS];
__shared__ int32_t warp_sums[WARPS];
__shared__ int32_t digit, above, inside, places[2];

__device__ __forceinline__ uint32_t order_of(float logit) {
    const uint32_t bits = __float_as_uint(add_exactly(logit, 0.0f));  // -0 becomes +0; every NaN 0x7fffffff
    return (bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u)) + 2;
}

// Calls act(key, position) for each of the token's items.
template <typename Act>
__device__ __forceinline__ void for_each_item(const MergeTopkParams& p, Act act) {
    for (int rank = 0; rank < p.ranks; ++rank) {
        const float* values = p.values + rank * p.values_rank + blockIdx.x * p.values_token;
        const int32_t* at = p.positions + rank * p.positions_rank + blockIdx.x * p.positions_token;
        for (int i = threadIdx.x; i < p.width; i += THREADS) {
            const int32_t position = at[i];
            if (position >= 0) act(uint64_t(order_of(values[i])) << 32 | ~uint32_t(position), position);
        }
    }
}

// Chosen are items whose key's upper bits are larger than `prefix`, and the first `ties` of those where they are equal.
struct Threshold {
    uint64_t prefix;
    int shift;  // of the key to its upper bits
    int ties;
};

// Finds the bin, from the top, in which the `need`-th largest item is; clears all of them.
__device__ __forceinline__ void find_bin(int need) {
    const int highest = BINS - 1 - threadIdx.x * BINS_OF_THREAD;
    int32_t mine[BINS_OF_THREAD], all = 0, total;
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; ++i) {
        mine[i] = int32_t(bins[highest - i]);
        bins[highest - i] = 0;
        all += mine[i];
    }
    int before = cta_sum_before(all, warp_sums, total);
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; ++i) {
        if (before < need && need <= before + mine[i]) {
            digit = highest - i;
            above = before;
            inside = mine[i];
        }
        before += mine[i];
    }
    __syncthreads();
}

// The threshold that the k largest items meet, of more than k.
__device__ __forceinline__ Threshold find_threshold(const MergeTopkParams& p) {
    Threshold t = {0, 64, p.k};
    while (t.shift > 0) {
        const int upper = t.shift, bits = min(upper, DIGIT);
        t.shift = upper - bits;
        for_each_item(p, [&](uint64_t key, int32_t) {
            if (upper == 64 || key >> upper == t.prefix)
                atomicAdd(&bins[uint32_t(key >> t.shift) & ((1u << bits) - 1)], 1u);
        });
        __syncthreads();
        find_bin(t.ties);
        t.prefix = t.prefix << bits | uint32_t(digit);
        t.ties -= above;
        if (inside == t.ties) break;
    }
    return t;
}

// Sorts the first `size` positions, a power of two of them.
__device__ __forceinline__ void sort_positions(int size) {
    for (int run = 2; run <= size; run *= 2) {
        for (int step = run / 2; step > 0; step /= 2) {
            for (int pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                const int low = pair / step * 2 * step + pair % step, high = low + step;
                const int32_t a = positions[low], b = positions[high];
                if ((a > b) == ((low & run) == 0)) {
                    positions[low] = b;
                    positions[high] = a;
                }
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_topk(const __grid_constant__ MergeTopkParams p) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    for (int i = threadIdx.x; i < MAX_K; i += THREADS) positions[i] = LAST;
    int mine = 0, found;
    for_each_item(p, [&](uint64_t, int32_t) { ++mine; });
    cta_sum_before(mine, warp_sums, found);
    __syncthreads();  // all have read the sums

    Threshold t = {0, 0, 0};  // below every item's key
    if (found > p.k) t = find_threshold(p);
    if (threadIdx.x == 0) {
        places[0] = 0;                                             // of larger keys
        places[1] = found > p.k ? p.k - t.ties : min(found, p.k);  // of equal ones
    }
    __syncthreads();
    for_each_item(p, [&](uint64_t key, int32_t position) {
        const uint64_t prefix = key >> t.shift;
        if (prefix < t.prefix || (prefix == t.prefix && t.ties == 0)) return;
        const int place = atomicAdd(&places[prefix == t.prefix], 1);
        if (place < p.k) positions[place] = position;
    });
    __syncthreads();
    const int chosen = min(found, p.k);
    int size = 2;
    while (size < chosen) size *= 2;
    sort_positions(size);
    int32_t* out = p.out + blockIdx.x * p.out_stride;
    for (int i = threadIdx.x; i < p.k; i += THREADS) out[i] = i < chosen ? positions[i] : -1;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
