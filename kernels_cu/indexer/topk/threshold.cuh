// The threshold of a row: the key of its k-th largest item, by radix.
//
//   pass    digit of the key    counted in the histogram
//   0       bits 31 .. 21       all items
//   1       bits 20 .. 10       items that agree with the k-th largest in bits 31 .. 21
//   2       bits 9 .. 0         items that agree with it in bits 31 .. 10
//
// Each pass counts a digit of the keys, then finds the bin, from the top, that has the k-th largest item. A search
// ends early where all items of that bin are chosen: the threshold is then just below the bin, and there are no ties.
#pragma once
#include "indexer/topk/items.cuh"

// How many items are larger than the threshold and how many equal it, 16 bits each. At most k are larger. Of equal
// items a whole row may have more than 16 bits hold, but none behind the first k is chosen: counts stop at MAX_K
// there.
struct LargerEqual {
    uint32_t packed;

    __device__ __forceinline__ int larger() const { return packed & 0xffff; }
    __device__ __forceinline__ int equal() const { return packed >> 16; }
};

// Chosen are the items of larger keys, and of those with this key the first `ties`.
struct Threshold {
    uint32_t key;
    int ties;
    LargerEqual before;  // in the row's CTAs before this one

    // How many of a row's first items are chosen, if so many of them are larger and equal.
    __device__ __forceinline__ int num_chosen(const LargerEqual& counts) const {
        return counts.larger() + min(counts.equal(), ties);
    }
};

// The lowest of the bins that a thread searches. Thread 0 has the highest bins.
__device__ __forceinline__ uint32_t* bins_of_thread(Histogram& all, int thread) {
    return &all[BINS - (thread + 1) * BINS_PER_THREAD];
}

// Called by the CTA.
__device__ __forceinline__ void clear(Histogram& all) {
#pragma unroll 1
    for (int i = threadIdx.x; i < BINS / 4; i += THREADS) reinterpret_cast<uint4*>(all)[i] = {0, 0, 0, 0};
}

// CLUSTERS: sums over all CTAs of the row, and over those before this one, of two neighbouring words.
struct ClusterSums {
    Vec8 all, before;

    // `mine` is where they stand in this CTA's shared memory; in the others' they stand at the same place.
    __device__ __forceinline__ explicit ClusterSums(const uint32_t* mine) : all{0, 0}, before{0, 0} {
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

// CLUSTERS: as find_bin_of_cta, over the histograms of all CTAs of the row, but does not clear the bins. Two steps
// keep what is read from other CTAs small: the sums of each warp's bins tell the warp whose bins have the item, then
// only the bins of that warp are read. Warp 0 does both.
__device__ __forceinline__ void find_bin_of_row(Histogram& all, uint32_t (&warp_bin_sums)[WARPS][2], int need) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    const uint32_t* const mine = bins_of_thread(all, threadIdx.x);
    const uint32_t of_warp = __reduce_add_sync(~0u, mine[0] + mine[1]);
    if (lane == 0) warp_bin_sums[warp][0] = of_warp;
    cluster_sync();
    if (warp == 0) {
        const ClusterSums group(warp_bin_sums[lane]);  // of the bins of warp number `lane`
        const int down_to_group = inclusive_sum(int(group.all.x), lane);
        const int found = __popc(__ballot_sync(~0u, down_to_group < need));  // the warp whose bins have the item
        const int above_group = __shfl_sync(~0u, down_to_group - int(group.all.x), found);
        const ClusterSums bins(bins_of_thread(all, 32 * found + lane));  // x: the lower one of two, y: the higher one
        const int down_to_low = above_group + inclusive_sum(int(bins.all.x + bins.all.y), lane);
        const int down_to_high = down_to_low - int(bins.all.x), above = down_to_high - int(bins.all.y);
        uint32_t above_before = lane < found ? group.before.x : 0;
        if (down_to_high < need) above_before += bins.before.y;
        if (down_to_low < need) above_before += bins.before.x;
        above_before = __reduce_add_sync(~0u, above_before);
        if (above < need && need <= down_to_low) {
            const bool low = down_to_high < need;
            shared().digit = BINS - 1 - (32 * found + lane) * BINS_PER_THREAD - low;
            shared().above = low ? down_to_high : above;
            shared().inside = low ? bins.all.x : bins.all.y;
            shared().above_before = above_before;
            shared().inside_before = low ? bins.before.x : bins.before.y;
        }
    }
    __syncthreads();
}

// Finds the bin, from the top, that has the `need`-th largest item. Sets shared().digit to the bin, shared().above to
// the number of items in the bins above it, and shared().inside to that in it. Clears the bins. Called by the CTA.
__device__ __forceinline__ void find_bin_of_cta(Histogram& all, int need) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    uint32_t* const lowest = bins_of_thread(all, threadIdx.x);
    uint32_t bins[BINS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; ++i) {
        bins[i] = 0;
        if (SEARCHERS < THREADS && threadIdx.x >= SEARCHERS) continue;
        bins[i] = lowest[BINS_PER_THREAD - 1 - i];
        lowest[BINS_PER_THREAD - 1 - i] = 0;
    }
    int mine = 0;
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; ++i) mine += bins[i];
    const int of_warp = __reduce_add_sync(~0u, mine);
    if (lane == 0) shared().warp_sums[warp] = of_warp;
    __syncthreads();
    int above = __reduce_add_sync(~0u, lane < warp ? shared().warp_sums[lane] : 0);
    if (above < need && need <= above + of_warp) {
        above += inclusive_sum(mine, lane) - mine;
#pragma unroll
        for (int i = 0; i < BINS_PER_THREAD; ++i) {
            if (above < need && need <= above + int(bins[i])) {
                shared().digit = BINS - 1 - threadIdx.x * BINS_PER_THREAD - i;
                shared().above = above;
                shared().inside = bins[i];
            }
            above += bins[i];
        }
    }
    __syncthreads();
}

// What is subtracted from the bits from `low` up of a key, so that its bin is left. The highest bin is that of the
// highest digit behind `prefix`, the bits from `high` up.
__device__ __forceinline__ uint32_t below_bins(uint32_t prefix, int high, int low) {
    return (prefix + 1 << (high - low)) - BINS;
}

// Counts a key's digit, the bits from `low` to before `high`, if the bits from `high` up are `prefix`. Where a digit
// has fewer values than there are bins, the lowest bins count items of smaller prefixes: no search from the top comes
// to them. Items that have no bin count in word BINS. A branch around the atomic would be worse: where not all lanes
// execute an atomic, the compiler lets the warp diverge and meet again.
__device__ __forceinline__ void count_digit(Histogram& bins, uint32_t key, uint32_t prefix, int high, int low) {
    uint32_t digit = (key >> low) - below_bins(prefix, high, low);
    if (high < 32) digit = min_in_32_bits(digit, BINS);
    atomicAdd(&bins[digit], 1u);
}

#if ORDERED
// Whether a source of items has the member list_keys.
template <typename Source>
constexpr bool LISTS_KEYS = false;
template <>
constexpr bool LISTS_KEYS<Items> = true;

// The threshold, where the `need`-th largest of the listed keys is the k-th largest of the row. A warp ranks one of
// the keys at a time: it compares it with all.
__device__ __forceinline__ Threshold find_in_list(int need) {
    __syncthreads();
    const int lane = threadIdx.x % 32, count = shared().num_listed;
    const uint32_t of_lane = lane < count ? shared().listed_keys[lane] : OUTSIDE;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < count; i += WARPS) {
        const uint32_t key = shared().listed_keys[i];
        const int larger = __popc(__ballot_sync(~0u, of_lane > key));
        const int equal = __popc(__ballot_sync(~0u, of_lane == key));
        if (lane == 0 && larger < need && need <= larger + equal) {
            shared().digit = key;
            shared().above = larger;
            shared().inside = equal;
        }
    }
    __syncthreads();
    const uint32_t key = shared().digit;
    need -= shared().above;
    if (shared().inside == need) return {key - 1, 0, {}};
    return {key, need, {}};
}
#endif

// The threshold of the row's items, of which at least k are inside the range. `source.for_each(act)` calls act(key)
// for each item of this thread. Called by the CTA, in a cluster by all CTAs of the row.
template <typename Source>
__device__ __forceinline__ Threshold find_threshold(const Source& source, int k) {
    uint32_t prefix = 0;         // the upper bits of the k-th largest key
    int need = k;                // the k-th largest is the `need`-th largest of the items with this prefix
    uint32_t larger_before = 0;  // items of larger prefixes in the CTAs before this one
#pragma unroll
    for (int pass = 0; pass < 3; ++pass) {
        const int high = 32 - 11 * pass, low = max(high - 11, 0);  // the digit is bits [low, high)
        auto& bins = shared().bins[CLUSTERS ? pass : 0];
        source.for_each([&](uint32_t key) { count_digit(bins, key, prefix, high, low); });
        uint32_t inside_before = 0;
        if constexpr (CLUSTERS) {
            find_bin_of_row(bins, shared().warp_bin_sums[pass], need);
            larger_before += shared().above_before;
            inside_before = shared().inside_before;
        } else {
            find_bin_of_cta(bins, need);
        }
        prefix = below_bins(prefix, high, low) + shared().digit;
        need -= shared().above;
        const bool whole_bin_is_chosen = shared().inside == need;
        if (whole_bin_is_chosen) return {max(prefix << low, 1u) - 1, 0, {larger_before + inside_before}};
        if (pass == 2) return {prefix, need, {larger_before | min(inside_before, MAX_K) << 16}};
#if ORDERED
        if constexpr (LISTS_KEYS<Source>) {
            if (pass == 1 && shared().inside <= MAX_LISTED) {
                source.list_keys(prefix << low, 1 << low);
                return find_in_list(need);
            }
        }
#endif
    }
    return {};
}
