// The k largest logits of each row's range, exact: of equal ones those with lower indices, ascending by position.
//
// A logit's *order* is an integer that is larger for larger logits: 0 outside the range, 1 for NaN, equal for both
// zeros. Everything is done with orders.
//
//   CTA        a row; with CLUSTERS, the CTAs of a cluster have a part of the row each
//     short row  ITEMS items a thread hold it in registers
//     long row   STREAMED: a sample of the row tells a logit that somewhat more than k of it are larger than.
//                Those go from memory into a pool in shared memory, in any order, and from there into registers. If the
//                pool gets less than k or more than it holds (the sample misled), each step below reads the row again.
//                ORDERED, more than 256 threads: the sample is searched by finer digits
//   find_threshold   the order of the k-th largest by radix: a histogram of the upper 11 bits, then of 11 and of 10
//                    more bits of the items that agree with it so far. A cluster's histograms are added up
//                    ORDERED: of few items that agree in two digits, a list, and each is compared with all
//   in order   short row: items are numbered part by part, warp by warp; the place of a chosen one is the number of
//              chosen ones before it, by sums over lanes, warps and CTAs. A CTA's are brought side by side in shared
//              memory first
//              long row: a bit of shared memory a column is set where an item is chosen. By the sums of bits before, a
//              thread brings the columns of a stretch of bits to their places in shared memory
//              ORDERED: the pool has the items of a chunk of columns side by side, ascending. Sums over the pool, and
//              over the chunks in the order of their columns, tell the places
//   results    positions, or with a block table slots: short rows add to four neighbouring columns what is kept
//              of their block in shared memory, long ones look up a block for each that is chosen
//
// No atomics decide about places, so results do not depend on timing. Of rows no longer than k all is chosen, whatever
// their logits are. FEW, rows in registers that begin at column 0: all columns are loaded while the row's end is still
// being read. ORDERED: many long rows of at most 2^20 columns. BF16: logits are bfloat16.
//
// Shared memory: 8 bytes an item of the pool, 8 KB a histogram (a cluster has three), 4 bytes a thread for blocks or 4 a
// chunk, and a few words a warp. Bits or ranks take the pool's place, chosen columns or results that of histograms.
#include "indexer/order.cuh"
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
constexpr int BINS = 2048;
constexpr int SEARCHERS = THREADS >= 1024 ? 1024 : THREADS >= 512 ? 512 : 256;  // threads that have bins
constexpr int BINS_OF_THREAD = BINS / SEARCHERS;
using Histogram = uint32_t[BINS + 4];  // word BINS counts what is in no bin; nothing reads it
constexpr int CAPACITY = !STREAMED ? 4 : TILE < 8192 ? TILE : 8192;  // of the pool
constexpr int WINDOW = CAPACITY / 2 * 32;  // columns whose choice is marked in shared memory at a time
constexpr int SAMPLED = 2;                 // vectors of a thread in the sample
constexpr uint32_t MAX_K = STREAMED ? CAPACITY / 2 : 4096;
constexpr int MAX_CLUSTER = 8;
constexpr uint32_t OUTSIDE = 0;
constexpr int32_t NO_SLOT = int32_t(0x80000000);  // a shift that makes every position negative
#if ORDERED
constexpr int CHUNK = 512;  // columns of a warp in a step through a row
// Of a row, at most: more than cupy_mla/cuda/topk.py lets it have.
constexpr int CHUNKS = THREADS >= 512 ? 2112 : 512;
constexpr int MOST_LISTED = 32;
#endif
static_assert(THREADS >= 256 && ITEMS % 4 == 0 && ITEMS <= 32, "");
static_assert(!STREAMED || CAPACITY % (2 * THREADS) == 0, "a thread has as many words of marks");
static_assert(!ORDERED || (STREAMED && !CLUSTERS && VECTORS == 4), "a byte a vector");
static_assert(!CLUSTERS || (BINS_OF_THREAD == 2 && WARPS == 32), "a lane a warp's sum, 8 bytes a lane of its bins");

struct Shared {
    union {
        Histogram bins[CLUSTERS ? 3 : 1];  // those of [0] are all 0 between uses
        // When histograms are no longer needed: those of chosen items, ascending; of short rows also their results.
        int32_t chosen_columns[MAX_K];
    };
    union {
        uint32_t pool[CAPACITY];  // logits that may be chosen, in any order
        // When those are in registers: a bit a column, if larger than the threshold, if equal.
        uint32_t marks[2][CAPACITY / 2];
#if ORDERED
        struct {
            uint32_t ranks[CAPACITY / 4 + 1];  // of four items: marked ones before them; the four's marks
            int32_t shifts_of_chunks[CHUNKS];  // what added to a rank in the pool makes it one by columns
        };
#endif
    };
    uint32_t columns[CAPACITY];    // of the pool
    uint32_t groups[3][WARPS][2];  // of a cluster, each pass: items in a warp's bins; the other word is not used
    uint32_t of_warp[WARPS];
#if ORDERED
    union {
        int32_t shifts[THREADS];  // of blocks of the table
        uint32_t chunks[CHUNKS];  // where a chunk's items are in the pool; in the lower 16 bits, how many
    };
    uint32_t list[MOST_LISTED], listed;  // the last orders that the k-th largest is one of
#else
    int32_t shifts[THREADS];  // of blocks of the table
#endif
    int32_t digit, above, inside, above_before, inside_before;
    uint32_t pooled;
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

// --- items ----------------------------------------------------------------------------------------------------

// What a CTA works on: columns [begin, end) of the logits.
struct Range {
    int begin, end;
};

// Without a table of requests.
__device__ __forceinline__ int request_of_row(const TopkParams& p, int row) {
    return p.queries <= 1 ? row : uint32_t(row) / uint32_t(p.queries);
}

__device__ __forceinline__ Range range_of_row(const TopkParams& p, int row) {
    int begin = p.starts == nullptr ? 0 : max(p.starts[row], 0), end = p.width;
    if (p.ends != nullptr) {
        if (p.queries == 0) {
            end = p.ends[row];
        } else {
            const int request = request_of_row(p, row), query = row - request * p.queries;
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

// A thread's logits of a part that registers hold, on their way. The items of all threads are numbered by warp, vector,
// lane, and place in the vector.
struct Tile {
    float4 vector[VECTORS];

    static __device__ __forceinline__ int first_of_warp_vector(int v) {
        return threadIdx.x / 32 * (VECTORS * 128) + v * 128;
    }
    static __device__ __forceinline__ int first_of_vector(int v) {
        return first_of_warp_vector(v) + threadIdx.x % 32 * 4;
    }

    // The items from column `first` on.
    __device__ __forceinline__ void load(const TopkParams& p, int row, const Range& range, int first) {
        const int thread_first = first + first_of_vector(0);
        const int64_t from = row * p.logits_stride + thread_first;
        if (p.aligned && first + first_of_warp_vector(VECTORS) <= range.end) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) vector[v] = logits_at(p, from + v * 128);
            return;
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int at = thread_first + v * 128;
            vector[v] = {0, 0, 0, 0};
            if (p.aligned && at < range.end && at + 4 <= p.width) vector[v] = logits_at(p, from + v * 128);
        }
        if (p.aligned && p.width % 4 == 0) return;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int at = thread_first + v * 128;
            if (p.aligned && at + 4 <= p.width) continue;
            if (at < range.end) vector[v].x = logit_at(p, from + v * 128);
            if (at + 1 < range.end) vector[v].y = logit_at(p, from + v * 128 + 1);
            if (at + 2 < range.end) vector[v].z = logit_at(p, from + v * 128 + 2);
            if (at + 3 < range.end) vector[v].w = logit_at(p, from + v * 128 + 3);
        }
    }
};

// Whether a loop over a thread's vectors looks there whether its warp has any more. Branches cost time. Behind a row's
// end most warps have none at all; a pool is filled in part only, and leaves all warps some.
__device__ constexpr bool may_end_before(int v) { return STREAMED || v == 0; }

// The orders of a thread's items.
struct Items {
    uint32_t order[VECTORS][4];
    int vectors;  // the others have nothing inside the range

    __device__ __forceinline__ uint32_t operator[](int i) const { return order[i / 4][i % 4]; }

    // Calls act(order) for each.
    template <typename Act>
    __device__ __forceinline__ void for_each(Act act) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (may_end_before(v) && v >= vectors) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) act(order[v][i]);
        }
    }

#if ORDERED
    // Those of which test(order) is true: bit 4 v + i of item i of vector v.
    template <typename Test>
    __device__ __forceinline__ uint32_t mask_of(Test test) const {
        uint32_t mask = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (v >= vectors) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) mask |= uint32_t(test(order[v][i])) << (4 * v + i);
        }
        return mask;
    }

    // Lists those of the `size` orders from `least` on. They are few: most threads have none.
    __device__ __forceinline__ void list(uint32_t least, uint32_t size) const {
        const uint32_t mask = mask_of([&](uint32_t order) { return order - least < size; });
        if (mask == 0) return;
        int to = atomicAdd(&shared().listed, uint32_t(__popc(mask)));
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (mask >> i & 1) shared().list[to++] = (*this)[i];
        }
    }
#endif

    __device__ __forceinline__ void set(const Tile& tile, const Range& range, int first) {
        const int rest = range.end - first - Tile::first_of_warp_vector(0);
        vectors = max(0, min(ceil_div(rest, 128), VECTORS));
        const bool whole = range.begin <= first && rest >= VECTORS * 128;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (may_end_before(v) && v >= vectors) break;
            const float4& x = tile.vector[v];
            const float of_vector[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) order[v][i] = order_of(of_vector[i]);
        }
        if (whole) return;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (may_end_before(v) && v >= vectors) break;
            const int at = first + Tile::first_of_vector(v);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (at + i < range.begin || range.end <= at + i) order[v][i] = OUTSIDE;
            }
        }
    }

    // Of the pool, each warp has as many vectors.
    static __device__ __forceinline__ int first_in_pool(int v) { return (v * THREADS + threadIdx.x) * 4; }

    // The first `items` of the pool.
    __device__ __forceinline__ void set_pooled(int items) {
        vectors = ceil_div(items, THREADS * 4);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int at = first_in_pool(v);
            uint4 four = {0, 0, 0, 0};
            if (at < items) four = *reinterpret_cast<const uint4*>(&shared().pool[at]);
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

// Counts of a thread's set bits, 8 bits a vector.
struct Counts {
    uint32_t four[ceil_div(VECTORS, 4)];

    __device__ __forceinline__ int of(int v) const { return four[v / 4] >> (v % 4 * 8) & 255; }
};

// Which of a thread's items are chosen, and how many before them.
struct Chosen {
    uint32_t mask;  // bit 4 v + i: item i of vector v
    int before;     // chosen items of the warps and CTAs before this one
    int vectors;    // the others have nothing that is chosen

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

    // Stores value_of(vector, item in it) of each chosen item of this thread at its place behind `to`.
    template <typename ValueOf>
    __device__ __forceinline__ void store(int32_t* to, ValueOf value_of) const {
        if (!__any_sync(~0u, mask != 0)) return;
        Counts totals;
        const Counts sums = before_vectors(mask, totals);
        to += before;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (may_end_before(v) && v >= vectors) break;
            int32_t* at = to + sums.of(v);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (mask >> (4 * v + i) & 1) *at++ = value_of(v, i);
            }
            to += totals.of(v);
        }
    }
};

// Called by the CTA.
__device__ __forceinline__ Chosen choose(const Items& items, const Threshold& threshold) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Not by Items::mask_of: with it every shape has other machine code, which was not timed.
    uint32_t larger = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i % 4 == 0 && may_end_before(i / 4) && i / 4 >= items.vectors) break;
        larger |= uint32_t(items[i] > threshold.order) << i;
    }
    if (threshold.ties > 0) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (i % 4 == 0 && may_end_before(i / 4) && i / 4 >= items.vectors) break;
            equal |= uint32_t(items[i] == threshold.order) << i;
        }
    }
    const Both of_warp = {uint32_t(__reduce_add_sync(~0u, __popc(larger) | __popc(equal) << 16))};
    if (lane == 0) shared().of_warp[warp] = of_warp.counts;
    __syncthreads();
    const uint32_t of_lane = lane < WARPS ? shared().of_warp[lane] : 0;
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
    return {larger, threshold.count(before), items.vectors};
}

// Behind choose: how many of the CTA are chosen.
__device__ __forceinline__ int count_chosen(const Threshold& threshold) {
    const int lane = threadIdx.x % 32;
    const uint32_t all = __reduce_add_sync(~0u, lane < WARPS ? shared().of_warp[lane] : 0);
    return threshold.count({all + threshold.before.counts}) - threshold.count(threshold.before);
}

// --- long rows ------------------------------------------------------------------------------------------------

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

// A part of a row that is read from memory in each pass: for rows of which a sample told too little.
struct InMemory {
    const TopkParams& p;
    int row;
    Range range;

    // Calls act(order, column) for each item of this thread from `begin` to before `end`.
    template <typename Act>
    __device__ __forceinline__ void for_columns(int begin, int end, Act act) const {
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
                    if (inside.begin <= at + i && at + i < inside.end) act(order_of(of_vector[i]), at + i);
                }
            }
        }
    }
    template <typename Act>
    __device__ __forceinline__ void for_each(Act act) const {
        for_columns(range.begin, range.end, [&](uint32_t order, int) { act(order); });
    }
};

// The next logit below one of this order, at least -inf. The order is a multiple of 1024: otherwise it might be -0.
__device__ __forceinline__ float logit_below(uint32_t order) {
    const uint32_t bits = max(order, 0x00800002u) - 3;
    return __uint_as_float(bits >> 31 ? bits ^ 0x80000000u : ~bits);
}

// A thread's logits of a sample of a row: pieces of 32 bytes from all over the row.
struct Sample {
    static constexpr int SIZE = THREADS * SAMPLED * 4, PIECES = SIZE / 8;  // of all threads
    float4 vector[SAMPLED];

    __device__ __forceinline__ void load(const TopkParams& p, int row, const Range& range) {
        const int64_t start = row * p.logits_stride;
        const int length = range.end - range.begin, base = range.begin / 4 * 4, step = length / PIECES;
#pragma unroll
        for (int v = 0; v < SAMPLED; ++v) {
            const int piece = (v * THREADS + threadIdx.x) / 2;
            vector[v] =
                logits_inside(p, start, base + int(int64_t(piece) * step) / 8 * 8 + threadIdx.x % 2 * 4, range, -INF);
        }
    }
};

// A logit that somewhat more than k of a row are larger than. Called by the CTA.
__device__ __forceinline__ float guess_threshold(const TopkParams& p, const Range& range, const Sample& sample) {
    constexpr int SIZE = Sample::SIZE;
    const int length = range.end - range.begin;
    uint32_t order[SAMPLED][4];
#pragma unroll
    for (int v = 0; v < SAMPLED; ++v) {
        const float4& x = sample.vector[v];
        const float of_vector[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) order[v][i] = order_of(of_vector[i]);
    }
    const float share = SIZE * reciprocal_approx(length), expected = p.k * share, room = CAPACITY * share;
    const int rank = max(1, int(min(expected + 6 * sqrt_approx(expected) + 4, (expected + room) * 0.5f)));
    const int most = max(rank, min(rank + rank / 2, int(room - 5 * sqrt_approx(room))));  // that the pool has room for
#if ORDERED && THREADS > 256
#pragma unroll
    for (int i = 0; i < 4 * SAMPLED; ++i) atomicAdd(&shared().bins[0][fine_digit(order[i / 4][i % 4])], 1u);
    find_bin_of_cta(shared().bins[0], rank);
    if (shared().above + shared().inside <= most) return logit_below(least_of_fine(shared().digit));
#endif
#pragma unroll
    for (int i = 0; i < 4 * SAMPLED; ++i) count_digit(shared().bins[0], order[i / 4][i % 4], 0, 32, 21);
    find_bin_of_cta(shared().bins[0], rank);
    const uint32_t digit = shared().digit;
    const int above = shared().above, inside = shared().inside;
    if (above + inside <= most) return logit_below(digit << 21);
#pragma unroll
    for (int i = 0; i < 4 * SAMPLED; ++i) count_digit(shared().bins[0], order[i / 4][i % 4], digit, 21, 10);
    find_bin_of_cta(shared().bins[0], rank - above);
    return logit_below(digit << 21 | shared().digit << 10);
}

// A thread's logits of a step through a range: of all threads, STEP neighbouring ones.
struct Step {
    static constexpr int DEPTH = 4, SIZE = DEPTH * THREADS * 4;
    float4 vector[DEPTH];

    static __device__ __forceinline__ int first_of_vector(int v) {
        if (ORDERED) return threadIdx.x / 32 * (DEPTH * 128) + v * 128 + threadIdx.x % 32 * 4;
        return (v * THREADS + threadIdx.x) * 4;
    }

    __device__ __forceinline__ void load(const TopkParams& p, int64_t start, const Range& range, int first) {
        const bool whole = p.aligned && range.begin <= first && first + SIZE <= range.end;
        if (whole) {
#pragma unroll
            for (int v = 0; v < DEPTH; ++v) vector[v] = logits_at(p, start + first + first_of_vector(v));
        } else {
#pragma unroll
            for (int v = 0; v < DEPTH; ++v) {
                vector[v] = logits_inside(p, start, first + first_of_vector(v), range, -INF);
            }
        }
    }

    // Which are larger than `below`: bit 4 v + i of item i of vector v.
    __device__ __forceinline__ uint32_t mask_above(float below) const {
        uint32_t larger = 0;  // the signs of the differences; that of NaN is 0
#pragma unroll
        for (int v = 0; v < DEPTH; ++v) {
            const float of_vector[4] = {vector[v].x, vector[v].y, vector[v].z, vector[v].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float difference = subtract_exactly(below, of_vector[i]);
                larger = __funnelshift_l(__float_as_uint(difference), larger, 1);
            }
        }
        return __brev(larger << (32 - 4 * DEPTH));
    }

#if ORDERED
    // Those that are larger than `below` go into the pool, as long as it has room: those of a warp side by side, by
    // columns. `chunk` is the number of this warp's columns among the chunks of the range.
    __device__ __forceinline__ void add_to_pool(float below, int first, int chunk) const {
        const int lane = threadIdx.x % 32;
        const uint32_t mask = mask_above(below);
        uint32_t counts = 0;  // a byte a vector
#pragma unroll
        for (int v = 0; v < DEPTH; ++v) counts |= __popc(mask >> 4 * v & 15) << 8 * v;
        uint32_t in_pool = 0;
        if (__any_sync(~0u, mask != 0)) {
            const uint32_t sums = inclusive_sum(counts, lane), totals = __shfl_sync(~0u, sums, 31);
            const uint32_t before = sums - counts;
            const int total = (totals & 255) + (totals >> 8 & 255) + (totals >> 16 & 255) + (totals >> 24);
            int at = 0;
            if (lane == 0) at = atomicAdd(&shared().pooled, uint32_t(total));
            at = __shfl_sync(~0u, at, 0);
            in_pool = at << 16 | total;
            if (at + total <= CAPACITY) {
#pragma unroll
                for (int v = 0; v < DEPTH; ++v) {
                    const float of_vector[4] = {vector[v].x, vector[v].y, vector[v].z, vector[v].w};
                    int to = at + (before >> 8 * v & 255);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (mask >> (4 * v + i) & 1) {
                            shared().pool[to] = __float_as_uint(of_vector[i]);
                            shared().columns[to++] = first + first_of_vector(v) + i;
                        }
                    }
                    at += totals >> 8 * v & 255;
                }
            }
        }
        if (lane == 0) shared().chunks[chunk] = in_pool;
    }
#else
    // Those that are larger than `below` go into the pool, as long as it has room.
    __device__ __forceinline__ void add_to_pool(float below, int first, int) const {
        const int lane = threadIdx.x % 32;
        const uint32_t mask = mask_above(below);
        if (!__any_sync(~0u, mask != 0)) return;
        const int mine = __popc(mask), sum = inclusive_sum(mine, lane);
        int at = 0;
        if (lane == 31) at = atomicAdd(&shared().pooled, uint32_t(sum));
        at = __shfl_sync(~0u, at, 31) + sum - mine;
        if (at + mine > CAPACITY) return;
        int to = at;
#pragma unroll
        for (int v = 0; v < DEPTH; ++v) {
            const float of_vector[4] = {vector[v].x, vector[v].y, vector[v].z, vector[v].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (mask >> (4 * v + i) & 1) {
                    shared().pool[to] = __float_as_uint(of_vector[i]);
                    shared().columns[to++] = first + first_of_vector(v) + i;
                }
            }
        }
    }
#endif
};

// Brings the logits of a range that are larger than `below` into the pool; those of the first step are loaded. Returns
// how many there are; those that find no room are not there.
__device__ __forceinline__ int fill_pool(const TopkParams& p, int row, const Range& range, float below, Step step) {
    const int64_t start = row * p.logits_stride;
    int first = range.begin / 4 * 4, chunk = threadIdx.x / 32;
    while (first < range.end) {
        const Step now = step;
        if (first + Step::SIZE < range.end) step.load(p, start, range, first + Step::SIZE);
        now.add_to_pool(below, first, chunk);
        first += Step::SIZE;
        chunk += WARPS;
    }
    __syncthreads();
    return shared().pooled;
}

#if ORDERED
// How many of the pool's marked items are before its place `at`.
__device__ __forceinline__ int rank_in_pool(int at) {
    const uint32_t four = shared().ranks[at / 4];
    return (four >> 4) + __popc(four & ((1u << at % 4) - 1));
}

// Marked items of the pool, and how many are before them: in their chunk by columns, and in all of the pool.
struct Marked {
    uint32_t mask;  // bit 4 v + i: item i of vector v
    int before[4];  // of vectors: how many are before in the pool
    int total;      // of the CTA

    // `range` is what the pool was filled from. Called by the CTA.
    __device__ __forceinline__ Marked(uint32_t mask, const Range& range) : mask(mask) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        uint32_t counts = 0;  // a byte a vector
#pragma unroll
        for (int v = 0; v < 4; ++v) counts |= __popc(mask >> 4 * v & 15) << 8 * v;
        const uint32_t sums = inclusive_sum(counts, lane), mine = sums - counts;
        if (lane == 31) shared().of_warp[warp] = sums;
        __syncthreads();
        const uint32_t of_lane = lane < WARPS ? shared().of_warp[lane] : 0;
        const uint32_t even = of_lane & 0x00ff00ff, odd = of_lane >> 8 & 0x00ff00ff;
        const uint32_t all_even = __reduce_add_sync(~0u, even), all_odd = __reduce_add_sync(~0u, odd);
        const uint32_t before_even = __reduce_add_sync(~0u, lane < warp ? even : 0);
        const uint32_t before_odd = __reduce_add_sync(~0u, lane < warp ? odd : 0);
        total = 0;
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            const int shift = v / 2 * 16;
            before[v] = total + ((v % 2 ? before_odd : before_even) >> shift & 0xffff) + (mine >> 8 * v & 255);
            total += (v % 2 ? all_odd : all_even) >> shift & 0xffff;
            if (v * THREADS * 4 < CAPACITY) {
                shared().ranks[v * THREADS + threadIdx.x] = before[v] << 4 | (mask >> 4 * v & 15);
            }
        }
        if (threadIdx.x == 0) shared().ranks[CAPACITY / 4] = total << 4;
        __syncthreads();
        const int chunks = ceil_div(range.end - range.begin / 4 * 4, Step::SIZE) * WARPS;
        const int each = ceil_div(chunks, THREADS), first = min(int(threadIdx.x) * each, chunks);
        const int last = min(first + each, chunks);
        int of_thread = 0;
#pragma unroll 1
        for (int i = first; i < last; ++i) of_thread += of_chunk(i);
        const int sum = inclusive_sum(of_thread, lane);
        if (lane == 31) shared().of_warp[warp] = sum;
        __syncthreads();
        int by_columns = __reduce_add_sync(~0u, lane < warp ? shared().of_warp[lane] : 0) + sum - of_thread;
#pragma unroll 1
        for (int i = first; i < last; ++i) {
            shared().shifts_of_chunks[i] = by_columns - rank_in_pool(shared().chunks[i] >> 16);
            by_columns += of_chunk(i);
        }
        __syncthreads();
    }

    // How many of a chunk's items are marked.
    static __device__ __forceinline__ int of_chunk(int chunk) {
        const uint32_t in_pool = shared().chunks[chunk], start = in_pool >> 16;
        return rank_in_pool(start + (in_pool & 0xffff)) - rank_in_pool(start);
    }

    // Calls act(number by columns, column, bit in the mask) for each marked item of this thread.
    template <typename Act>
    __device__ __forceinline__ void for_each(int vectors, const Range& range, Act act) const {
        const int base = range.begin / 4 * 4;
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            if (v >= vectors) break;
            const uint4 four = *reinterpret_cast<const uint4*>(&shared().columns[Items::first_in_pool(v)]);
            const uint32_t columns[4] = {four.x, four.y, four.z, four.w};
            int rank = before[v];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (mask >> (4 * v + i) & 1) {
                    const int column = columns[i];
                    act(shared().shifts_of_chunks[(column - base) / CHUNK] + rank++, column, 4 * v + i);
                }
            }
        }
    }
};

// Brings the chosen of the pool's items into shared().chosen_columns, ascending, less `start`. Returns how many they
// are. Called by the CTA, when no one needs its histograms any more.
__device__ __forceinline__ int bring_pooled_in_order(const Items& items, const Range& range,
                                                     const Threshold& threshold, int start) {
    uint32_t larger = items.mask_of([&](uint32_t order) { return order > threshold.order; }), equal = 0;
    if (threshold.ties > 0) equal = items.mask_of([&](uint32_t order) { return order == threshold.order; });
    int total = 0;
#pragma unroll 1
    for (bool of_equal = threshold.ties > 0, again = true; again; of_equal = false) {
        const Marked marked(of_equal ? equal : larger, range);
        marked.for_each(items.vectors, range, [&](int number, int column, int bit) {
            if (of_equal) {
                if (number < threshold.ties) larger |= 1u << bit;
            } else {
                shared().chosen_columns[number] = column - start;
            }
        });
        total = marked.total;
        again = of_equal;
    }
    __syncthreads();
    return total;
}
#endif

// Marks a column of a window, if it is to be, as larger than the threshold or equal to it. Without a branch.
__device__ __forceinline__ void mark_if(bool when, bool equal, uint32_t column) {
    atomicOr(&shared().marks[equal][column % WINDOW / 32], when ? 1u << column % 32 : 0);
}

// How much is marked in some words: in the lower 14 bits larger ones, in the others equal ones.
__device__ __forceinline__ uint32_t count_marks(uint32_t larger, uint32_t equal) {
    return __popc(larger) | __popc(equal) << 14;
}

__device__ __forceinline__ uint32_t first_bits(uint32_t bits, int count) {
    uint32_t first = 0;
    for (int i = 0; i < count && bits != 0; ++i, bits &= bits - 1) first |= bits & (0u - bits);
    return first;
}

// Brings the columns of a range's chosen items into shared().chosen_columns, ascending. Returns how many they are.
// `mark_window(begin, end)` marks those of these columns that the threshold does not rule out. Called by the CTA, when
// no one needs its histograms any more.
template <typename MarkWindow>
__device__ __forceinline__ int bring_in_order(const Range& range, const Threshold& threshold, MarkWindow mark_window) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ties = threshold.ties;
    const bool with_equal = ties > 0;
    const auto& marks = shared().marks;
    const int ties_before = min(threshold.before.equal(), ties);
    int larger = 0, equal = threshold.before.equal();  // in the windows before; in the CTAs before too
    for (int begin = range.begin / 4 * 4; begin < range.end; begin += WINDOW) {
        const int end = min(range.end - begin, WINDOW) + begin;
        const int words = ceil_div(end - begin, 32 * THREADS);  // a thread
        __syncthreads();                                        // what was there has been read
        for (int i = threadIdx.x; i < words * THREADS; i += THREADS) {
            shared().marks[0][i] = 0;
            if (with_equal) shared().marks[1][i] = 0;
        }
        __syncthreads();
        mark_window(begin, end);
        __syncthreads();
        const int first = threadIdx.x * words;
        uint32_t mine = 0;
        for (int i = first; i < first + words; ++i) mine += count_marks(marks[0][i], with_equal ? marks[1][i] : 0);
        const uint32_t sum = inclusive_sum(mine, lane);
        if (lane == 31) shared().of_warp[warp] = sum;
        __syncthreads();
        const uint32_t of_lane = lane < WARPS ? shared().of_warp[lane] : 0;
        const uint32_t before = __reduce_add_sync(~0u, lane < warp ? of_lane : 0) + sum - mine;
        const uint32_t all = __reduce_add_sync(~0u, of_lane);
        int equal_before = equal + int(before >> 14);
        int place = larger + int(before & 0x3fff) + min(equal_before, ties) - ties_before;
        for (int i = first; i < first + words; ++i) {
            uint32_t bits = marks[0][i];
            if (with_equal) {
                bits |= first_bits(marks[1][i], ties - equal_before);
                equal_before += __popc(marks[1][i]);
            }
            for (; bits != 0; bits &= bits - 1) {
                shared().chosen_columns[place++] = begin + 32 * i + __popc((bits & (0u - bits)) - 1);
            }
        }
        larger += all & 0x3fff;
        equal += all >> 14;
    }
    __syncthreads();
    return larger + min(equal, ties) - ties_before;
}

// --- results --------------------------------------------------------------------------------------------------

// The request's row of the block table; null: the table has no such request.
__device__ __forceinline__ const int32_t* blocks_of_row(const TopkParams& p, int row) {
    const int request = p.requests == nullptr ? request_of_row(p, row) : p.requests[row];
    return has_request(p.table, request) ? p.table.blocks + request * p.table.stride : nullptr;
}

// Makes slots of the positions of a part of a row: a position's slot is the position plus the shift of its block, and
// -1 where that is negative. Shifts are in shared memory, one a thread at most.
struct Shifts {
    int first, count;  // blocks; count 0: slots are not made here

    __device__ __forceinline__ Shifts(const TopkParams& p, const Range& of_row, const Range& range)
        : first(0), count(0) {
        if (p.table.blocks == nullptr || range.begin >= range.end) return;
        first = divide(range.begin - of_row.begin, p.table.block_size);
        const int blocks = divide(range.end - 1 - of_row.begin, p.table.block_size) - first + 1;
        if (blocks <= THREADS) count = blocks;
    }

    // The shift of this thread's block.
    __device__ __forceinline__ int32_t load(const TopkParams& p, int row) const {
        const int number = first + threadIdx.x;
        if (threadIdx.x >= count || number >= p.table.width) return NO_SLOT;
        const int32_t* const blocks = blocks_of_row(p, row);
        const int32_t slot = blocks == nullptr ? -1 : slot_in_block(p.table, blocks[number], 0);
        return slot < 0 ? NO_SLOT : int32_t(slot - number * p.table.block_size.value);
    }

    __device__ __forceinline__ uint32_t shifted(const TopkParams& p, int32_t position) const {
        return position + shared().shifts[min(divide(position, p.table.block_size) - first, count - 1)];
    }
    static __device__ __forceinline__ int32_t slot_of(uint32_t shifted) { return max(int32_t(shifted), -1); }
};

// Where results go: `place` counts from 0.
struct Results {
    int32_t* to;
    int32_t start;          // subtracted from columns
    const int32_t* blocks;  // the request's row of the block table; null: positions

    __device__ __forceinline__ int32_t position_of(int32_t column) const { return column - start; }
    __device__ __forceinline__ int32_t slot_of(const TopkParams& p, int32_t column) const {
        const Position at = find_position(p.table, column - start);
        return blocks != nullptr && at.column >= 0 ? slot_in_block(p.table, blocks[at.column], at.offset) : -1;
    }

    // Stores what stands side by side in shared memory, from `place` on. Called by the CTA.
    __device__ __forceinline__ void copy(int place, int count) const {
        const int32_t* const from = shared().chosen_columns;
        int32_t* const there = to + place;
        const int fours = reinterpret_cast<uint64_t>(there) % 16 == 0 ? count / 4 : 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < fours; i += THREADS) {
            reinterpret_cast<uint4*>(there)[i] = reinterpret_cast<const uint4*>(from)[i];
        }
#pragma unroll 1
        for (int i = 4 * fours + threadIdx.x; i < count; i += THREADS) there[i] = from[i];
    }

    // Stores what becomes of column_of(0), column_of(1) and so on, from `place` on. Called by the CTA.
    template <typename ColumnOf>
    __device__ __forceinline__ void store(const TopkParams& p, int place, int count, ColumnOf column_of) const {
        constexpr int AT_A_TIME = 4;  // reads of the block table under way
        for (int first = threadIdx.x; first < count; first += AT_A_TIME * THREADS) {
            int32_t result[AT_A_TIME];
#pragma unroll
            for (int j = 0; j < AT_A_TIME; ++j) {
                const int32_t column = column_of(min(first + j * THREADS, count - 1));
                result[j] = p.table.blocks == nullptr ? position_of(column) : slot_of(p, column);
            }
#pragma unroll
            for (int j = 0; j < AT_A_TIME; ++j) {
                const int i = first + j * THREADS;
                if (i < count) to[place + i] = result[j];
            }
        }
    }
};

__device__ __forceinline__ Results results_of(const TopkParams& p, int row, const Range& range) {
    const int32_t* const blocks = p.table.blocks == nullptr ? nullptr : blocks_of_row(p, row);
    return {p.out + row * p.out_stride, range.begin, blocks};
}

// All of a range of at most k items are chosen. Not inline: its code would stand in front of the other rows'.
__device__ __noinline__ void choose_all(const TopkParams& p, int row, Range range) {
    int32_t* const to = p.out + row * p.out_stride;
    const int count = range.end - range.begin;
    const Shifts shifts(p, range, range);
    if (shifts.count > 0) {
        shared().shifts[threadIdx.x] = shifts.load(p, row);
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += THREADS) to[i] = Shifts::slot_of(shifts.shifted(p, i));
    } else {
        results_of(p, row, range).store(p, 0, count, [&](int i) { return range.begin + i; });
    }
    for (int place = count + threadIdx.x; place < p.k; place += THREADS) to[place] = -1;
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

// Stores what bring_in_order left in shared memory.
__device__ __forceinline__ void store_chosen(const TopkParams& p, int row, const Range& of_row,
                                             const Threshold& threshold, int count) {
    const Results results = results_of(p, row, of_row);
    results.store(p, threshold.count(threshold.before), count, [&](int i) { return shared().chosen_columns[i]; });
}

// Chooses from a part of a row of which the sample told too little. Not inline, as it is rare.
__device__ __noinline__ void choose_in_memory(const TopkParams& p, int row, Range of_row, Range range) {
    const InMemory items = {p, row, range};
    const Threshold threshold = find_threshold(items, p.k);
    end_reading_of_others();
    wait_for_readers();
    const uint32_t least = threshold.order + (threshold.ties == 0);
    const int count = bring_in_order(range, threshold, [&](int begin, int end) {
        items.for_columns(begin, end, [&](uint32_t order, int column) {
            mark_if(order >= least, order == threshold.order, column - begin);
        });
    });
    store_chosen(p, row, of_row, threshold, count);
}

// Chooses from a part of a row that registers do not hold. The first step's logits are on their way with the sample's.
__device__ __forceinline__ void choose_streamed(const TopkParams& p, int row, const Range& of_row,
                                                const Range& range) {
    Sample sample;
    sample.load(p, row, of_row);
    Step step;
    step.load(p, row * p.logits_stride, range, range.begin / 4 * 4);
    __syncthreads();  // bins are 0
    const int pooled = fill_pool(p, row, range, guess_threshold(p, of_row, sample), step);
    if (pools_suffice(pooled, p.k)) {
        Items items;
        items.set_pooled(pooled);
        const Threshold threshold = find_threshold(items, p.k);
        end_reading_of_others();
        wait_for_readers();
#if ORDERED
        const bool positions = p.table.blocks == nullptr;
        const int count = bring_pooled_in_order(items, range, threshold, positions ? of_row.begin : 0);
        if (positions) {
            results_of(p, row, of_row).copy(0, count);
        } else {
            store_chosen(p, row, of_row, threshold, count);
        }
#else
        const uint32_t least = threshold.order + (threshold.ties == 0);
        const int count = bring_in_order(range, threshold, [&](int begin, int end) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                if (v >= items.vectors) break;
                const uint4 four = *reinterpret_cast<const uint4*>(&shared().columns[Items::first_in_pool(v)]);
                const uint32_t columns[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t order = items.order[v][i], column = columns[i] - begin;
                    mark_if(order >= least && column < uint32_t(end - begin), order == threshold.order, column);
                }
            }
        });
        store_chosen(p, row, of_row, threshold, count);
#endif
    } else {
        choose_in_memory(p, row, of_row, range);
    }
}

// Chooses from a part of a row that registers hold: from a tile that begins at column `first`.
__device__ __forceinline__ void choose_held(const TopkParams& p, int row, const Range& of_row, const Range& range,
                                            int first, const Tile& tile) {
    const Shifts shifts(p, of_row, range);
    const bool by_shifts = shifts.count > 0 && of_row.begin % 4 == 0 && p.table.block_size.value % 4 == 0;
    const int32_t shift = by_shifts ? shifts.load(p, row) : 0;
    __syncthreads();  // bins are 0
    Items items;
    items.set(tile, range, first);
    if (by_shifts) shared().shifts[threadIdx.x] = shift;
    const Threshold threshold = find_threshold(items, p.k);
    end_reading_of_others();
    const auto column_of = [&](int v) { return first + Tile::first_of_vector(v); };
    const auto position_of = [&](int v) { return column_of(v) - of_row.begin; };
    const Chosen chosen = choose(items, threshold);
    wait_for_readers();
    const int place = CLUSTERS ? threshold.count(threshold.before) : 0;
    int32_t* const side_by_side = shared().chosen_columns - place;
    if (p.table.blocks == nullptr) {
        chosen.store(side_by_side, [&](int v, int i) { return position_of(v) + i; });
    } else if (by_shifts) {
        uint32_t slots[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) slots[v] = shifts.shifted(p, position_of(v));
        chosen.store(side_by_side, [&](int v, int i) { return Shifts::slot_of(slots[v] + i); });
    } else {
        chosen.store(side_by_side, [&](int v, int i) { return column_of(v) + i; });
    }
    __syncthreads();
    const int count = CLUSTERS ? count_chosen(threshold) : p.k;
    const Results results = results_of(p, row, of_row);
    if (p.table.blocks == nullptr || by_shifts) {
        results.copy(place, count);
    } else {
        results.store(p, place, count, [&](int i) { return shared().chosen_columns[i]; });
    }
}

// Loads a part that registers can hold, and chooses from it.
__device__ __forceinline__ void load_and_choose(const TopkParams& p, int row, const Range& of_row,
                                                const Range& range) {
    const int first = range.begin / 4 * 4;
    Tile tile;
    tile.load(p, row, range, first);
    choose_held(p, row, of_row, range, first, tile);
}

// The same, for the kernels that are not made for it. Not inline: code in front of theirs would cost them time.
__device__ __noinline__ void load_and_choose_aside(const TopkParams& p, int row, Range of_row, Range range) {
    load_and_choose(p, row, of_row, range);
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) topk(const __grid_constant__ TopkParams p) {
    let_next_kernel_start();
    const int parts = num_parts(), part = this_part(), row = blockIdx.x / parts;
    for (Histogram& bins : shared().bins) clear(bins);
    if (threadIdx.x == 0) shared().pooled = 0;
#if ORDERED
    if (threadIdx.x == 0) shared().listed = 0;
#endif
    wait_for_earlier_kernels();
#if FEW && !STREAMED
    Tile tile;
    const bool early = p.starts == nullptr;
    if (early) tile.load(p, row, {0, p.width}, 0);
#endif
    const Range of_row = range_of_row(p, row);
    const int length = of_row.end - of_row.begin;
    if (length <= p.k) {
        if (part == 0) choose_all(p, row, of_row);
        return;
    }
    const Range range = part_of(of_row, part, parts);
#if STREAMED
    if (ceil_div(length, parts) + 8 > TILE) {
        choose_streamed(p, row, of_row, range);
    } else {
        load_and_choose_aside(p, row, of_row, range);
    }
#elif FEW
    if (early) {
        const Range from_0 = {0, of_row.end};
        choose_held(p, row, from_0, from_0, 0, tile);
    } else {
        load_and_choose_aside(p, row, of_row, range);
    }
#else
    load_and_choose(p, row, of_row, range);
#endif
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = sizeof(Shared);
