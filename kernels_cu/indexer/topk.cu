// The k largest logits of each row's range, exact: of equal ones those with lower indices, ascending by position.
//
// A logit's *order* is an integer that is larger for larger logits: 0 outside the range, 1 for NaN, equal for both
// zeros. Everything is done with orders.
//
//   CTA        a row; with CLUSTERS, the CTAs of a cluster have a part of the row each
//     short row  ITEMS items a thread hold it in registers
//     long row   STREAMED: a sample of the row tells a logit that somewhat more than k of it are not smaller than. Those
//                go from memory into a pool in shared memory, in any order, and from there into registers. If the pool
//                gets less than k or more than it holds (the sample misled), each step below reads the row again
//   find_threshold   the order of the k-th largest by radix: a histogram of the upper 11 bits, then of 11 and of 10 more
//                    bits of the items that agree with it so far. After the first, those are few: they are listed in
//                    shared memory. A cluster's histograms are added up
//   in order   short row: items are numbered part by part, warp by warp; the place of a chosen one is the number of
//              chosen ones before it, by sums over lanes, warps and CTAs
//              long row: a bit of shared memory a column is set where an item is chosen, and counted over words, lanes,
//              warps and CTAs
//
// No atomics decide about places, so results do not depend on timing. Rows no longer than k are not read. BF16: logits
// are bfloat16.
//
// Shared memory: 8 bytes an item of the pool, 8 KB a histogram (a cluster has three), 8 or 16 KB for the list and the
// bits, and a few words a warp.
#include "ptx/arithmetic.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/shared.cuh"
#include "rows/block_table.cuh"
#include "tile/warp.cuh"
#if CLUSTERS
#include "ptx/cluster.cuh"
#endif

// cupy_mla/cuda/structs.py declares the same fields.
struct TopkParams {
    BlockTable table;         // for slots as results; `blocks` is null for positions
    const void* logits;       // [rows, width]
    const int32_t* starts;    // [rows], or null
    const int32_t* ends;      // [rows]; [rows / queries] or [rows / queries, queries] context lengths; or null
    const int32_t* requests;  // [rows] rows of the table; null: row / queries
    int32_t* out;             // [rows, k]
    int64_t logits_stride, out_stride, lens_stride;  // items
    int32_t rows, width, k;
    int32_t queries;  // of a request: `ends` are context lengths; 0: they are ends
    int32_t aligned;  // rows allow loads of four logits
    int32_t unused;
};

constexpr int WARPS = THREADS / 32;
constexpr int VECTORS = ITEMS / 4, TILE = THREADS * ITEMS;  // items
constexpr int BINS = 2048, BINS_OF_THREAD = BINS / THREADS;
constexpr int WINDOW = CLUSTERS ? 32768 : 65536;     // columns whose choice is marked in shared memory at a time
constexpr int CAPACITY = STREAMED ? 8192 : 4;        // of the pool: twice the largest k
constexpr int NEAR = STREAMED ? WINDOW / 16 : 2048;  // items of a bin that are listed
constexpr int SAMPLED = 2;                           // vectors of a thread in the sample
constexpr int MAX_CLUSTER = 8;
constexpr uint32_t MAX_K = 4096;
constexpr uint32_t OUTSIDE = 0;
static_assert(BINS % THREADS == 0 && CAPACITY <= TILE && ITEMS % 4 == 0 && ITEMS <= 32, "");
static_assert(!CLUSTERS || (BINS_OF_THREAD == 2 && WARPS == 32), "a lane a warp's sum, 8 bytes a lane of its bins");

struct Shared {
    uint32_t bins[CLUSTERS ? 3 : 1][BINS];  // those of [0] are all 0 between uses
    union {
        uint32_t near[NEAR];                            // orders of the items in the first pass' bin, in any order
        uint32_t marks[2][STREAMED ? WINDOW / 32 : 4];  // a bit a column: larger than the threshold, equal to it
    };
    uint32_t pool[2][CAPACITY];    // logits that may be chosen, in any order, and their columns
    uint32_t groups[3][WARPS][2];  // of a cluster, each pass: items in a warp's bins; the other word is not used
    uint32_t chosen[WARPS];
    uint64_t marked[WARPS];
    int32_t warp_sums[WARPS];
    int32_t digit, above, inside, above_before, inside_before;
    uint32_t listed, pooled;
};
extern __shared__ uint4 shared_bytes[];
__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(shared_bytes); }

// The CTAs that work on a row together, and this CTA among them.
__device__ __forceinline__ int num_parts() {
#if CLUSTERS
    return cluster_size();
#else
    return 1;
#endif
}
__device__ __forceinline__ int this_part() {
#if CLUSTERS
    return cluster_rank();
#else
    return 0;
#endif
}

// This CTA reads nothing more from the shared memory of the row's other CTAs.
__device__ __forceinline__ void end_reading_of_others() {
#if CLUSTERS
    cluster_arrive();
#endif
}
// The row's other CTAs have read what they need of this one's: it may end.
__device__ __forceinline__ void wait_for_readers() {
#if CLUSTERS
    cluster_wait();
#endif
}

// Who takes part in a step: the CTA, or all CTAs of the row.
enum class Scope { CTA, ROW };

__device__ __forceinline__ uint32_t order_of(float logit) {
    const uint32_t bits = __float_as_uint(add_exactly(logit, 0.0f));  // -0 becomes +0; every NaN 0x7fffffff
    return (bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u)) + 2;
}

// --- items ----------------------------------------------------------------------------------------------------

// What a CTA works on: columns [begin, end) of the logits.
struct Range {
    int begin, end;
};

__device__ __forceinline__ Range range_of_row(const TopkParams& p, int row) {
    int begin = p.starts == nullptr ? 0 : max(p.starts[row], 0), end = p.width;
    if (p.ends != nullptr) {
        if (p.queries == 0) {
            end = p.ends[row];
        } else {
            const int request = row / p.queries, query = row - request * p.queries;
            end =
                p.lens_stride == 0 ? p.ends[request] - p.queries + query + 1 : p.ends[request * p.lens_stride + query];
        }
    }
    begin = min(begin, p.width);
    return {begin, max(begin, min(end, p.width))};
}

// A part's share of a row's range, cut at whole vectors.
__device__ __forceinline__ Range part_of(const Range& range, int part, int parts) {
    const int base = range.begin / 4 * 4, size = ceil_div(ceil_div(range.end - base, parts), 4) * 4;
    const int64_t begin = base + int64_t(part) * size;
    return {max(int(min(begin, int64_t(range.end))), range.begin), int(min(begin + size, int64_t(range.end)))};
}

__device__ __forceinline__ float logit_at(const TopkParams& p, int64_t at) {
#if BF16
    return bf16_to_float(static_cast<const bf16*>(p.logits)[at]);
#else
    return static_cast<const float*>(p.logits)[at];
#endif
}

// Four neighbouring logits.
__device__ __forceinline__ float4 logits_at(const TopkParams& p, int64_t at) {
#if BF16
    const Vec8 v = *reinterpret_cast<const Vec8*>(static_cast<const bf16*>(p.logits) + at);
    return {bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y)};
#else
    return *reinterpret_cast<const float4*>(static_cast<const float*>(p.logits) + at);
#endif
}

// Four neighbouring logits from column `at` on of those of [begin, end); `outside` for the others.
__device__ __forceinline__ float4 logits_inside(const TopkParams& p, int64_t start, int at, const Range& range,
                                                float outside) {
    float4 x = {outside, outside, outside, outside};
    if (p.aligned && range.begin <= at && at + 4 <= range.end) {
        x = logits_at(p, start + at);
    } else {
        if (range.begin <= at && at < range.end) x.x = logit_at(p, start + at);
        if (range.begin <= at + 1 && at + 1 < range.end) x.y = logit_at(p, start + at + 1);
        if (range.begin <= at + 2 && at + 2 < range.end) x.z = logit_at(p, start + at + 2);
        if (range.begin <= at + 3 && at + 3 < range.end) x.w = logit_at(p, start + at + 3);
    }
    return x;
}

// The orders of a thread's items. Items are numbered by warp, vector, lane, and place in the vector. Every warp has as
// many vectors as are needed.
struct Items {
    uint32_t order[VECTORS][4];
    int vectors;

    __device__ __forceinline__ uint32_t operator[](int i) const { return order[i / 4][i % 4]; }
    __device__ __forceinline__ int first_of_vector(int v) const {
        return (threadIdx.x / 32 * vectors + v) * 128 + threadIdx.x % 32 * 4;
    }
    __device__ __forceinline__ void count(int items) { vectors = ceil_div(items, WARPS * 128); }

    // The logits of a range, from column `first` on.
    __device__ __forceinline__ void load(const TopkParams& p, int row, const Range& range, int first) {
        count(range.end - first);
        const int64_t start = row * p.logits_stride;
        float4 vector[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            vector[v] = {0, 0, 0, 0};
            if (v < vectors) vector[v] = logits_inside(p, start, first + first_of_vector(v), range, 0);
        }
        const bool whole = range.begin == first && range.end - first == vectors * (WARPS * 128);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const float4& x = vector[v];
            const float of_vector[4] = {x.x, x.y, x.z, x.w};
            const int at = first + first_of_vector(v);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                order[v][i] = order_of(of_vector[i]);
                if (!whole && (at + i < range.begin || range.end <= at + i)) order[v][i] = OUTSIDE;
            }
        }
    }

    // The first `items` of the pool.
    __device__ __forceinline__ void load_pool(int items) {
        count(items);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int at = first_of_vector(v);
            uint4 four = {0, 0, 0, 0};
            if (v < vectors && at < items) four = *reinterpret_cast<const uint4*>(&shared().pool[0][at]);
            const uint32_t values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) order[v][i] = at + i < items ? order_of(__uint_as_float(values[i])) : OUTSIDE;
        }
    }
};

// --- selection ------------------------------------------------------------------------------------------------

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
};

// Thread number `thread` has the bins from here on; those of thread 0 are the highest.
__device__ __forceinline__ uint32_t* bins_of_thread(uint32_t (&all)[BINS], int thread) {
    return &all[BINS - (thread + 1) * BINS_OF_THREAD];
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
__device__ __forceinline__ void find_bin_of_row(uint32_t (&all)[BINS], uint32_t (&groups)[WARPS][2], int need) {
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
__device__ __forceinline__ void find_bin_of_cta(uint32_t (&all)[BINS], int need) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    uint32_t* const lowest = bins_of_thread(all, threadIdx.x);
    uint32_t bins[BINS_OF_THREAD];
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; ++i) {
        bins[i] = lowest[BINS_OF_THREAD - 1 - i];
        lowest[BINS_OF_THREAD - 1 - i] = 0;
    }
    int mine = 0;
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; ++i) mine += bins[i];
    int above = inclusive_sum(mine, lane);
    if (lane == 31) shared().warp_sums[warp] = above;
    __syncthreads();
    above += __reduce_add_sync(~0u, lane < warp ? shared().warp_sums[lane] : 0) - mine;
    if (above < need && need <= above + mine) {
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

// The digits of an order.
__device__ constexpr int digit_width(int pass) { return pass == 2 ? 10 : 11; }
__device__ constexpr int digit_shift(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }

template <int PASS>
__device__ __forceinline__ void count_digit(uint32_t (&bins)[BINS], uint32_t order) {
    atomicAdd(&bins[order >> digit_shift(PASS) & ((1u << digit_width(PASS)) - 1)], 1u);
}
// Only if the digits before are those of `prefix`.
template <int PASS>
__device__ __forceinline__ void count_digit_of(uint32_t (&bins)[BINS], uint32_t order, uint32_t prefix) {
    if (PASS == 0 || order >> (digit_shift(PASS) + digit_width(PASS)) == prefix) count_digit<PASS>(bins, order);
}

// Items in registers. The first pass tells which are larger than the threshold for sure, and which are near it: those
// of its bin. They are few, and the other passes look at a list of them.
struct Held {
    Items items;
    uint32_t sure = 0, near = 0;  // bit 4 v + i: item i of vector v
    int first_near = 0;           // this thread's place in the list
    int listed = 0;               // of the CTA; 0: too many

    template <int PASS>
    __device__ __forceinline__ void count(uint32_t (&bins)[BINS], uint32_t prefix) const {
        if (PASS > 0 && listed > 0) {
            for (int i = threadIdx.x; i < listed; i += THREADS) count_digit_of<PASS>(bins, shared().near[i], prefix);
            return;
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (v >= items.vectors) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) count_digit_of<PASS>(bins, items.order[v][i], prefix);
        }
    }

    // The first digit of the threshold is known, and how many items of the CTA have it.
    __device__ __forceinline__ void narrow(uint32_t digit, int count) {
        const uint32_t low = digit << digit_shift(0), high = low | ((1u << digit_shift(0)) - 1);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (v >= items.vectors) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t order = items.order[v][i];
                if (order > high) sure |= 1u << (4 * v + i);
                if (order >= low) near |= 1u << (4 * v + i);
            }
        }
        near &= ~sure;
        if (count > NEAR || count == 0) return;
        listed = count;
        if (__any_sync(~0u, near != 0)) {
            const int lane = threadIdx.x % 32, mine = __popc(near), sum = inclusive_sum(mine, lane);
            int first = 0;
            if (lane == 31) first = atomicAdd(&shared().listed, uint32_t(sum));
            first_near = __shfl_sync(~0u, first, 31) + sum - mine;
            uint32_t* to = &shared().near[first_near];
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (near >> i & 1) *to++ = items[i];
            }
        }
        __syncthreads();
    }

    // Which items are larger than the threshold, and which are equal to it.
    __device__ __forceinline__ void compare(uint32_t threshold, uint32_t& larger, uint32_t& equal) const {
        larger = sure, equal = 0;
        if (listed > 0) {
            int at = first_near;
            for (uint32_t left = near; left != 0; left &= left - 1, ++at) {
                const uint32_t bit = left & (0u - left), order = shared().near[at];
                if (order > threshold) larger |= bit;
                if (order == threshold) equal |= bit;
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (near >> i & 1) {
                larger |= uint32_t(items[i] > threshold) << i;
                equal |= uint32_t(items[i] == threshold) << i;
            }
        }
    }
};

// A part of a row that is read from memory in each pass: for rows of which a sample told too little.
struct InMemory {
    const TopkParams& p;
    int row;
    Range range;

    // Calls act(column, order) for each item of this thread from `begin` to before `end`.
    template <typename Act>
    __device__ __forceinline__ void for_each(int begin, int end, Act act) const {
        constexpr int DEPTH = 2;
        const int64_t start = row * p.logits_stride;
        const Range inside = {max(begin, range.begin), min(end, range.end)};
        for (int first = inside.begin / 4 * 4; first < inside.end; first += DEPTH * THREADS * 4) {
            float4 vector[DEPTH];
#pragma unroll
            for (int v = 0; v < DEPTH; ++v) {
                vector[v] = logits_inside(p, start, first + (v * THREADS + threadIdx.x) * 4, inside, 0);
            }
#pragma unroll
            for (int v = 0; v < DEPTH; ++v) {
                const float of_vector[4] = {vector[v].x, vector[v].y, vector[v].z, vector[v].w};
                const int at = first + (v * THREADS + threadIdx.x) * 4;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (inside.begin <= at + i && at + i < inside.end) act(at + i, order_of(of_vector[i]));
                }
            }
        }
    }
    template <int PASS>
    __device__ __forceinline__ void count(uint32_t (&bins)[BINS], uint32_t prefix) const {
        for_each(range.begin, range.end, [&](int, uint32_t order) { count_digit_of<PASS>(bins, order, prefix); });
    }
    __device__ __forceinline__ void narrow(uint32_t, int) const {}
};

// Looks for the threshold that the k largest items meet, of at least k inside the range.
template <Scope SCOPE>
struct Search {
    static constexpr bool OF_ROW = SCOPE == Scope::ROW && CLUSTERS;
    int need;             // k, less the items that are larger than those of this prefix
    uint32_t prefix = 0;  // the digits of the k-th largest item's order so far
    uint32_t larger_before = 0;
    Threshold found = {};

    // Finds one more digit. Returns whether the threshold is known.
    template <int PASS, typename Source>
    __device__ __forceinline__ bool pass(Source& source) {
        auto& bins = shared().bins[OF_ROW ? PASS : 0];
        source.template count<PASS>(bins, prefix);
#if CLUSTERS
        if constexpr (OF_ROW) {
            find_bin_of_row(bins, shared().groups[PASS], need);
        } else
#endif
            find_bin_of_cta(bins, need);
        const uint32_t digit = shared().digit;
        const int inside = shared().inside;
        prefix = prefix << digit_width(PASS) | digit;
        need -= shared().above;
        uint32_t inside_before = 0;
        if constexpr (OF_ROW) {
            larger_before += shared().above_before;
            inside_before = shared().inside_before;
        }
        if constexpr (PASS == 0) source.narrow(digit, OF_ROW ? int(bins[digit]) : inside);
        if (inside == need) {  // All items of the bin are chosen: the threshold is just below it.
            found = {max(prefix << digit_shift(PASS), 1u) - 1, 0, {larger_before + inside_before}};
            return true;
        }
        found = {prefix, need, {larger_before | min(inside_before, MAX_K) << 16}};
        return PASS == 2;
    }
};

template <Scope SCOPE, typename Source>
__device__ __forceinline__ Threshold find_threshold(Source& source, int k) {
    Search<SCOPE> search = {k};
    if (!search.template pass<0>(source) && !search.template pass<1>(source)) search.template pass<2>(source);
    return search.found;
}

// Counts of a thread's set bits, 8 bits a vector.
struct Counts {
    uint32_t four[ceil_div(VECTORS, 4)];

    __device__ __forceinline__ int of(int v) const { return four[v / 4] >> (v % 4 * 8) & 255; }
};

// Which of a thread's items are chosen, and how many before them.
struct Chosen {
    uint32_t mask;  // bit 4 v + i: item i of vector v
    int before;     // chosen items of the warps before this one

    // The numbers of set bits before each of a thread's vectors in its warp; and of all vectors.
    static __device__ __forceinline__ Counts before_vectors(uint32_t mask, Counts& totals) {
        Counts before;
#pragma unroll
        for (int j = 0; j < ceil_div(VECTORS, 4); ++j) {
            uint32_t counts = 0;
#pragma unroll
            for (int v = 0; v < 4; ++v) counts |= __popc(mask >> (16 * j + 4 * v) & 15) << (8 * v);
            const uint32_t sums = inclusive_sum(counts, threadIdx.x % 32);
            totals.four[j] = __shfl_sync(~0u, sums, 31);
            before.four[j] = sums - counts;
        }
        return before;
    }

    // Calls act(whether it is chosen, place, vector, item in it) for each item of this thread.
    template <typename Act>
    __device__ __forceinline__ void for_all(Act act) const {
        if (!__any_sync(~0u, mask != 0)) return;
        Counts totals;
        const Counts sums = before_vectors(mask, totals);
        int place = before;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            int at = place + sums.of(v);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t is_chosen = mask >> (4 * v + i) & 1;
                act(is_chosen != 0, at, v, i);
                at += is_chosen;
            }
            place += totals.of(v);
        }
    }
};

// Called by the CTA.
__device__ __forceinline__ Chosen choose(const Held& held, const Threshold& threshold) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t larger, equal;
    held.compare(threshold.order, larger, equal);
    if (threshold.ties == 0) equal = 0;
    const Both of_warp = {__reduce_add_sync(~0u, __popc(larger) | __popc(equal) << 16)};
    if (lane == 0) shared().chosen[warp] = of_warp.counts;
    __syncthreads();
    const uint32_t of_lane = lane < WARPS ? shared().chosen[lane] : 0;
    const Both before = {__reduce_add_sync(~0u, lane < warp ? of_lane : 0) + threshold.before.counts};
    const int left = threshold.ties - before.equal();  // ties for this warp and those behind it
    if (left > 0 && of_warp.equal() != 0) {
        if (of_warp.equal() <= left) {
            larger |= equal;
        } else {  // some of them
            Counts totals;
            const Counts sums = Chosen::before_vectors(equal, totals);
            int number = 0;  // of equal items in vectors before
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const uint32_t in_vector = equal >> (i / 4 * 4) & ((1u << i % 4) - 1);
                const int place = number + sums.of(i / 4) + __popc(in_vector);
                if (equal >> i & 1 && place < left) larger |= 1u << i;
                if (i % 4 == 3) number += totals.of(i / 4);
            }
        }
    }
    return {larger, before.larger() + min(before.equal(), threshold.ties)};
}

// --- long rows ------------------------------------------------------------------------------------------------

__device__ __forceinline__ float logit_of(uint32_t order) {
    const uint32_t bits = max(order, 0x00800001u) - 2;  // at least -inf
    return __uint_as_float(bits >> 31 ? bits ^ 0x80000000u : ~bits);
}

// A logit that somewhat more than k of a row are not smaller than, by a sample: pieces of 32 bytes from all over the row.
// Called by the CTA.
__device__ __forceinline__ float guess_threshold(const TopkParams& p, int row, const Range& range) {
    constexpr int SIZE = THREADS * SAMPLED * 4, PIECES = SIZE / 8;
    const int64_t start = row * p.logits_stride;
    const int length = range.end - range.begin, base = range.begin / 4 * 4, step = length / PIECES;
    float4 vector[SAMPLED];
#pragma unroll
    for (int v = 0; v < SAMPLED; ++v) {
        const int piece = (v * THREADS + threadIdx.x) / 2;
        vector[v] =
            logits_inside(p, start, base + int(int64_t(piece) * step) / 8 * 8 + threadIdx.x % 2 * 4, range, -INF);
    }
    uint32_t order[SAMPLED][4];
#pragma unroll
    for (int v = 0; v < SAMPLED; ++v) {
        const float of_vector[4] = {vector[v].x, vector[v].y, vector[v].z, vector[v].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) order[v][i] = order_of(of_vector[i]);
    }
    const float share = float(SIZE) / length, expected = p.k * share;
    const int rank = max(1, int(min(expected + 6 * sqrt_approx(expected) + 4, (p.k + CAPACITY) * 0.5f * share)));
#pragma unroll
    for (int i = 0; i < 4 * SAMPLED; ++i) count_digit<0>(shared().bins[0], order[i / 4][i % 4]);
    find_bin_of_cta(shared().bins[0], rank);
    const uint32_t digit = shared().digit;
    const int above = shared().above, inside = shared().inside;
    if (above + inside <= rank + rank / 2) return logit_of(digit << digit_shift(0));
#pragma unroll
    for (int i = 0; i < 4 * SAMPLED; ++i) count_digit_of<1>(shared().bins[0], order[i / 4][i % 4], digit);
    find_bin_of_cta(shared().bins[0], rank - above);
    return logit_of((digit << digit_width(1) | shared().digit) << digit_shift(1));
}

// A thread's logits of a step through a range: of all threads, STEP neighbouring ones.
struct Step {
    static constexpr int DEPTH = 4, SIZE = DEPTH * THREADS * 4;
    float4 vector[DEPTH];

    static __device__ __forceinline__ int first_of_vector(int v) { return (v * THREADS + threadIdx.x) * 4; }

    __device__ __forceinline__ void load(const TopkParams& p, int64_t start, const Range& range, int first) {
        const bool whole = p.aligned && range.begin <= first && first + SIZE <= range.end;
        if (whole) {
#pragma unroll
            for (int v = 0; v < DEPTH; ++v) vector[v] = logits_at(p, start + first + first_of_vector(v));
        } else {
            const float nan = __uint_as_float(0x7fffffff);
#pragma unroll
            for (int v = 0; v < DEPTH; ++v) {
                vector[v] = logits_inside(p, start, first + first_of_vector(v), range, nan);
            }
        }
    }

    // Those that are at least `least` go into the pool, as long as it has room.
    __device__ __forceinline__ void add_to_pool(float least, int first) const {
        const int lane = threadIdx.x % 32;
        uint32_t mask = 0;
#pragma unroll
        for (int v = 0; v < DEPTH; ++v) {
            if (vector[v].x >= least) mask |= 1u << (4 * v);
            if (vector[v].y >= least) mask |= 2u << (4 * v);
            if (vector[v].z >= least) mask |= 4u << (4 * v);
            if (vector[v].w >= least) mask |= 8u << (4 * v);
        }
        if (!__any_sync(~0u, mask != 0)) return;
        const int mine = __popc(mask), sum = inclusive_sum(mine, lane);
        int at = 0;
        if (lane == 31) at = atomicAdd(&shared().pooled, uint32_t(sum));
        at = __shfl_sync(~0u, at, 31) + sum - mine;
        if (at + mine > CAPACITY) return;
        uint32_t* to = &shared().pool[0][at];
#pragma unroll
        for (int v = 0; v < DEPTH; ++v) {
            const float of_vector[4] = {vector[v].x, vector[v].y, vector[v].z, vector[v].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (mask >> (4 * v + i) & 1) {
                    to[0] = __float_as_uint(of_vector[i]);
                    to[CAPACITY] = first + first_of_vector(v) + i;
                    ++to;
                }
            }
        }
    }
};

// Brings the logits of a range that are at least `least` into the pool. Returns how many there are; those that find no
// room are not there.
__device__ __forceinline__ int fill_pool(const TopkParams& p, int row, const Range& range, float least) {
    const int64_t start = row * p.logits_stride;
    int first = range.begin / 4 * 4;
    Step step;
    step.load(p, start, range, first);
    while (first < range.end) {
        const Step now = step;
        if (first + Step::SIZE < range.end) step.load(p, start, range, first + Step::SIZE);
        now.add_to_pool(least, first);
        first += Step::SIZE;
    }
    __syncthreads();
    return shared().pooled;
}

__device__ __forceinline__ void mark(bool equal, int column_in_window) {
    atomicOr(&shared().marks[equal][column_in_window / 32], 1u << (column_in_window % 32));
}

// Calls act(place, column) for each of the chosen items of a range, by windows of its columns. `mark_window(begin)` marks
// what is larger than the threshold or equal to it in the window that begins there. Called by the CTA.
template <typename MarkWindow, typename Act>
__device__ __forceinline__ void for_marked(const Range& range, const Threshold& threshold, MarkWindow mark_window,
                                           Act act) {
    constexpr int WORDS = WINDOW / 32 / THREADS;  // of a thread
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t before = uint64_t(threshold.before.equal()) << 32 | uint32_t(threshold.before.larger());
    for (int begin = range.begin / 4 * 4; begin < range.end; begin += WINDOW) {
        __syncthreads();  // what was there has been read
        for (int i = threadIdx.x; i < WINDOW / 64; i += THREADS) {
            reinterpret_cast<uint4*>(shared().marks)[i] = {0, 0, 0, 0};
        }
        __syncthreads();
        mark_window(begin);
        __syncthreads();
        uint32_t larger[WORDS], equal[WORDS];
        uint64_t sums[WORDS], of_warp = 0;  // of words before
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
            const int word = (warp * WORDS + j) * 32 + lane;
            larger[j] = shared().marks[0][word];
            equal[j] = threshold.ties == 0 ? 0 : shared().marks[1][word];
            const uint64_t counts = uint64_t(__popc(equal[j])) << 32 | uint32_t(__popc(larger[j]));
            const uint64_t sum = inclusive_sum(counts, lane);
            sums[j] = of_warp + sum - counts;
            of_warp += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0) shared().marked[warp] = of_warp;
        __syncthreads();
        uint64_t warps_before = before;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            if (i < warp) warps_before += shared().marked[i];
            before += shared().marked[i];
        }
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
            const uint64_t here = warps_before + sums[j];
            const int equal_before = int(here >> 32), left = threshold.ties - equal_before;
            uint32_t bits = 0;  // the first `left` of the equal ones
            for (int i = 0; i < left && equal[j] != 0; ++i) {
                bits |= equal[j] & (0u - equal[j]);
                equal[j] &= equal[j] - 1;
            }
            bits |= larger[j];
            int place = int(uint32_t(here)) + min(equal_before, threshold.ties);
            for (; bits != 0; bits &= bits - 1, ++place) {
                act(place, begin + ((warp * WORDS + j) * 32 + lane) * 32 + __popc((bits & (0u - bits)) - 1));
            }
        }
    }
}

// --- results --------------------------------------------------------------------------------------------------

// Where results go: `place` counts from 0.
struct Results {
    int32_t* to;
    int32_t start;          // subtracted from columns
    const int32_t* blocks;  // the request's row of the block table; null: positions

    __device__ __forceinline__ void store_position(int place, int32_t column) const { to[place] = column - start; }
    __device__ __forceinline__ void store_slot(const TopkParams& p, int place, int32_t column) const {
        const Position at = find_position(p.table, column - start);
        to[place] = blocks != nullptr && at.column >= 0 ? slot_in_block(p.table, blocks[at.column], at.offset) : -1;
    }
};

__device__ __forceinline__ Results results_of(const TopkParams& p, int row, const Range& range) {
    const int32_t* blocks = nullptr;
    if (p.table.blocks != nullptr) {
        const int request = p.requests == nullptr ? row / max(p.queries, 1) : p.requests[row];
        if (has_request(p.table, request)) blocks = p.table.blocks + request * p.table.stride;
    }
    return {p.out + row * p.out_stride, range.begin, blocks};
}

// All of a range of at most k items are chosen.
__device__ __forceinline__ void choose_all(const TopkParams& p, const Results& results, const Range& range) {
    const int count = range.end - range.begin;
    for (int place = threadIdx.x; place < p.k; place += THREADS) {
        if (place < count) {
            if (p.table.blocks == nullptr) {
                results.store_position(place, range.begin + place);
            } else {
                results.store_slot(p, place, range.begin + place);
            }
        } else {
            results.to[place] = -1;
        }
    }
}

// Whether the pools of the row's CTAs hold at least k items, all that were brought there. Called by all CTAs.
__device__ __forceinline__ bool pools_suffice(int count, int k) {
#if CLUSTERS
    cluster_sync();
    const int lane = threadIdx.x % 32, parts = num_parts();
    const int of_part = lane < parts ? load_cluster_4(cluster_address(shared_address(&shared().pooled), lane)) : 0;
    return __reduce_add_sync(~0u, of_part) >= k && !__any_sync(~0u, of_part > CAPACITY);
#else
    return k <= count && count <= CAPACITY;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) topk(const __grid_constant__ TopkParams p) {
    let_next_kernel_start();
    const int parts = num_parts(), part = this_part(), row = blockIdx.x / parts;
    constexpr int ALL_BINS = sizeof(Shared::bins) / sizeof(uint4);
    for (int i = threadIdx.x; i < ALL_BINS; i += THREADS) reinterpret_cast<uint4*>(shared().bins)[i] = {0, 0, 0, 0};
    if (threadIdx.x == 0) shared().listed = shared().pooled = 0;
    wait_for_earlier_kernels();
    const Range of_row = range_of_row(p, row);
    if (of_row.end - of_row.begin <= p.k) {
        if (part == 0) choose_all(p, results_of(p, row, of_row), of_row);
        return;
    }
    const Results results = results_of(p, row, of_row);
    const auto store = [&](int place, int32_t column) {
        if (p.table.blocks == nullptr) {
            results.store_position(place, column);
        } else {
            results.store_slot(p, place, column);
        }
    };
    const Range range = part_of(of_row, part, parts);
    const int first = range.begin / 4 * 4;
    Held held;
#if STREAMED
    if (ceil_div(of_row.end - of_row.begin, parts) + 8 > TILE) {
        __syncthreads();  // bins are 0
        const float least = guess_threshold(p, row, of_row);
        const int count = fill_pool(p, row, range, least);
        if (pools_suffice(count, p.k)) {
            held.items.load_pool(count);
            const Threshold threshold = find_threshold<Scope::ROW>(held, p.k);
            end_reading_of_others();
            uint32_t larger, equal;
            held.compare(threshold.order, larger, equal);
            const auto mark_window = [&](int begin) {
                for (uint32_t left = larger | equal; left != 0; left &= left - 1) {
                    const uint32_t bit = left & (0u - left);
                    const int i = __popc(bit - 1);
                    const uint32_t at = shared().pool[1][held.items.first_of_vector(i / 4) + i % 4] - begin;
                    if (at < WINDOW) mark((equal & bit) != 0, at);
                }
            };
            for_marked(range, threshold, mark_window, store);
        } else {
            InMemory all = {p, row, range};
            const Threshold threshold = find_threshold<Scope::ROW>(all, p.k);
            end_reading_of_others();
            const auto mark_window = [&](int begin) {
                all.for_each(begin, begin + WINDOW, [&](int column, uint32_t order) {
                    if (order >= max(threshold.order, 1u)) mark(order == threshold.order, column - begin);
                });
            };
            for_marked(range, threshold, mark_window, store);
        }
        wait_for_readers();
        return;
    }
#endif
    held.items.load(p, row, range, first);
    __syncthreads();  // bins are 0
    const Threshold threshold = find_threshold<Scope::ROW>(held, p.k);
    end_reading_of_others();
    const Chosen chosen = choose(held, threshold);
    const auto column_of = [&](int v, int i) { return first + held.items.first_of_vector(v) + i; };
    if (p.table.blocks == nullptr) {
        chosen.for_all([&](bool is_chosen, int place, int v, int i) {
            store_4_if(is_chosen, results.to + place, column_of(v, i) - results.start);
        });
    } else {
        chosen.for_all([&](bool is_chosen, int place, int v, int i) {
            if (is_chosen) results.store_slot(p, place, column_of(v, i));
        });
    }
    wait_for_readers();
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = sizeof(Shared);
