// The threshold: the order of the k-th largest item, by radix.
#pragma once
#include "indexer/topk/items.cuh"

// How many items are larger than the threshold and how many equal to it, in 16 bits each. The equal ones of a whole row
// may be more than that holds; more than k of them are never wanted.
struct Both {
    uint32_t counts;

    __device__ __forceinline__ int larger() const { return counts & 0xffff; }
    __device__ __forceinline__ int equal() const { return counts >> 16; }
};

// Chosen are items of a larger order, and the first `ties` of the same.
struct Threshold {
    uint32_t order;
    int ties;
    Both before;  // in the CTAs of the row before this one

    // How many are chosen up to where so many are larger and equal.
    __device__ __forceinline__ int count(const Both& both) const { return both.larger() + min(both.equal(), ties); }
};

// Thread number `thread` has the bins from here on; those of thread 0 are the highest.
__device__ __forceinline__ uint32_t* bins_of_thread(Histogram& all, int thread) {
    return &all[BINS - (thread + 1) * BINS_OF_THREAD];
}

// Called by the CTA.
__device__ __forceinline__ void clear(Histogram& all) {
#pragma unroll 1
    for (int i = threadIdx.x; i < BINS / 4; i += THREADS) reinterpret_cast<uint4*>(all)[i] = {0, 0, 0, 0};
}

#if CLUSTERS
// Sums over the CTAs of the row, and over those before this one.
struct Sums {
    Vec8 all, before;

    // Of what each has at this place of its shared memory.
    __device__ __forceinline__ explicit Sums(const uint32_t* mine) : all{0, 0}, before{0, 0} {
        const int parts = num_parts(), part = this_part();
        Vec8 of_part[MAX_CLUSTER];
#pragma unroll
        for (int i = 0; i < MAX_CLUSTER; ++i) {
            of_part[i] = {0, 0};
            if (i < parts) of_part[i] = load_cluster_8(cluster_address(shared_address(mine), i));
        }
#pragma unroll
        for (int i = 0; i < MAX_CLUSTER; ++i) {
            if (i == part) before = all;
            all.x += of_part[i].x;
            all.y += of_part[i].y;
        }
    }
};

// As find_bin_of_cta, over the histograms of all CTAs of the row, in two steps, so that little is read from other CTAs:
// first the warp in whose bins the item is, by the warps' sums, then the bin.
__device__ __forceinline__ void find_bin_of_row(Histogram& all, uint32_t (&groups)[WARPS][2], int need) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    const uint32_t* const mine = bins_of_thread(all, threadIdx.x);
    const uint32_t group = __reduce_add_sync(~0u, mine[0] + mine[1]);
    if (lane == 0) groups[warp][0] = group;
    cluster_sync();
    if (warp == 0) {
        const Sums group(groups[lane]);
        const int to_group = inclusive_sum(int(group.all.x), lane);
        const int found = __popc(__ballot_sync(~0u, to_group < need));
        const int above_group = __shfl_sync(~0u, to_group - int(group.all.x), found);
        const Sums bins(bins_of_thread(all, 32 * found + lane));  // y is the higher one
        const int to_low = above_group + inclusive_sum(int(bins.all.x + bins.all.y), lane);
        const int to_high = to_low - int(bins.all.x), above = to_high - int(bins.all.y);
        uint32_t above_before = lane < found ? group.before.x : 0;
        if (to_high < need) above_before += bins.before.y;
        if (to_low < need) above_before += bins.before.x;
        above_before = __reduce_add_sync(~0u, above_before);
        if (above < need && need <= to_low) {
            const bool low = to_high < need;
            shared().digit = BINS - 1 - (32 * found + lane) * BINS_OF_THREAD - low;
            shared().above = low ? to_high : above;
            shared().inside = low ? bins.all.x : bins.all.y;
            shared().above_before = above_before;
            shared().inside_before = low ? bins.before.x : bins.before.y;
        }
    }
    __syncthreads();
}
#endif

// Finds the bin, from the top, in which the `need`-th largest item is: shared().digit, items in the bins above it, and
// in it. Clears the bins.
__device__ __forceinline__ void find_bin_of_cta(Histogram& all, int need) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    uint32_t* const lowest = bins_of_thread(all, threadIdx.x);
    uint32_t bins[BINS_OF_THREAD];
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; ++i) {
        bins[i] = 0;
        if (SEARCHERS < THREADS && threadIdx.x >= SEARCHERS) continue;
        bins[i] = lowest[BINS_OF_THREAD - 1 - i];
        lowest[BINS_OF_THREAD - 1 - i] = 0;
    }
    int mine = 0;
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; ++i) mine += bins[i];
    const int of_warp = __reduce_add_sync(~0u, mine);
    if (lane == 0) shared().of_warp[warp] = of_warp;
    __syncthreads();
    int above = __reduce_add_sync(~0u, lane < warp ? shared().of_warp[lane] : 0);
    if (above < need && need <= above + of_warp) {
        above += inclusive_sum(mine, lane) - mine;
#pragma unroll
        for (int i = 0; i < BINS_OF_THREAD; ++i) {
            if (above < need && need <= above + int(bins[i])) {
                shared().digit = BINS - 1 - threadIdx.x * BINS_OF_THREAD - i;
                shared().above = above;
                shared().inside = bins[i];
            }
            above += bins[i];
        }
    }
    __syncthreads();
}

#if ORDERED && THREADS > 256
// One of 2048 digits of an order, larger for larger logits: 32 for each power of two from 2^-16 to 2^16, of either sign.
// What is nearer to 0 has digit NEAR_0, beyond are 0 and the last.
constexpr int FINE_SHIFT = 18, NEAR_0 = 1023;
constexpr int NEGATIVE_DIGITS = 3616, POSITIVE_DIGITS = 10720;  // what of an order's upper bits is no digit
__device__ __forceinline__ uint32_t fine_digit(uint32_t order) {
    const int upper = order >> FINE_SHIFT;
    return max(min(max(upper - NEGATIVE_DIGITS, 0), NEAR_0), min(upper - POSITIVE_DIGITS, BINS - 1));
}
// The least order of a digit.
__device__ __forceinline__ uint32_t least_of_fine(int digit) {
    return digit == 0 ? 0 : uint32_t(digit + (digit <= NEAR_0 ? NEGATIVE_DIGITS : POSITIVE_DIGITS)) << FINE_SHIFT;
}
#endif

// Counts a digit of an order, the bits from `shift` to `above`, if those from there on are `prefix`. The bins end with
// the prefix' highest digit; below its lowest there may be items of smaller prefixes, which no search from the top comes
// to. Without a branch, which the compiler makes of an atomic that not all lanes execute.
__device__ __forceinline__ void count_digit(Histogram& bins, uint32_t order, uint32_t prefix, int above, int shift) {
    uint32_t digit = (order >> shift) - ((prefix + 1 << (above - shift)) - BINS);
    if (above < 32) digit = min_in_32_bits(digit, BINS);
    atomicAdd(&bins[digit], 1u);
}

#if ORDERED
// Whether a source of items can list few of them.
template <typename Source>
constexpr bool LISTS = false;
template <>
constexpr bool LISTS<Items> = true;

// The threshold among the last items, those in the list. A warp ranks one of them at a time.
__device__ __forceinline__ Threshold find_in_list(int need) {
    __syncthreads();
    const int lane = threadIdx.x % 32, count = shared().listed;
    const uint32_t of_lane = lane < count ? shared().list[lane] : OUTSIDE;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < count; i += WARPS) {
        const uint32_t item = shared().list[i];
        const int larger = __popc(__ballot_sync(~0u, of_lane > item));
        const int equal = __popc(__ballot_sync(~0u, of_lane == item));
        if (lane == 0 && larger < need && need <= larger + equal) {
            shared().digit = item;
            shared().above = larger;
            shared().inside = equal;
        }
    }
    __syncthreads();
    const uint32_t order = shared().digit;
    need -= shared().above;
    if (shared().inside == need) return {order - 1, 0, {}};
    return {order, need, {}};
}
#endif

// The threshold that the k largest items meet, of at least k inside the range. Each pass finds a digit.
template <typename Source>
__device__ __forceinline__ Threshold find_threshold(const Source& source, int k) {
    uint32_t prefix = 0;  // the upper bits of the k-th largest item's order
    int need = k;         // less the items that are larger than those of this prefix
    uint32_t larger_before = 0;
#pragma unroll
    for (int pass = 0; pass < 3; ++pass) {
        const int above = 32 - 11 * pass, shift = max(above - 11, 0);
        auto& bins = shared().bins[CLUSTERS ? pass : 0];
        source.for_each([&](uint32_t order) { count_digit(bins, order, prefix, above, shift); });
        uint32_t inside_before = 0;
#if CLUSTERS
        find_bin_of_row(bins, shared().groups[pass], need);
        larger_before += shared().above_before;
        inside_before = shared().inside_before;
#else
        find_bin_of_cta(bins, need);
#endif
        prefix = (prefix + 1 << (above - shift)) - BINS + shared().digit;
        need -= shared().above;
        // All items of the bin are chosen: the threshold is just below it.
        if (shared().inside == need) return {max(prefix << shift, 1u) - 1, 0, {larger_before + inside_before}};
        if (pass == 2) return {prefix, need, {larger_before | min(inside_before, MAX_K) << 16}};
#if ORDERED
        if constexpr (LISTS<Source>) {
            if (pass == 1 && shared().inside <= MOST_LISTED) {
                source.list(prefix << shift, 1 << shift);
                return find_in_list(need);
            }
        }
#endif
    }
    return {};
}
