// The k largest logits of each row's range, exact: of equal ones those with lower indices, ascending by position.
//
// A logit's *order* is an integer that is larger for larger logits: 0 outside the range, 1 for NaN, equal for both
// zeros. Everything is done with orders.
//
//   CTA        a row; with CLUSTERS, the CTAs of a cluster have a part of the row each. Reads it once, in tiles of
//              ITEMS items a thread
//     one tile   stays in registers
//     more     BUFFERED: the next tile is under way while one is worked on. Of the first tile the k largest go into the
//              buffer; of the others what is above the threshold. Equal ones do not: k items that are not smaller came
//              before. When a tile does not fit, the buffer is cut down to its k largest, and the threshold rises
//     end      of the tile or the buffer, of all CTAs of the cluster, the k largest are the result
//   find_threshold   the order of the k-th largest by radix: a histogram of the upper 11 bits, then of 11 and of 10 more
//                    bits of the items that agree with it so far. A cluster's histograms are added up by each CTA
//   in order   items are numbered part by part, warp by warp; the place of a chosen one is the number of chosen ones
//              before it, by sums over lanes, warps and CTAs. No atomics decide about places, so results do not depend on
//              timing
//
// Rows no longer than k are not read. BF16: logits are bfloat16.
//
// Shared memory: 8 bytes an item of the buffer, 8 KB a histogram (a cluster has three), and a few words a warp.
#include "ptx/arithmetic.cuh"
#include "ptx/convert.cuh"
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
constexpr int CAPACITY = BUFFERED ? 8192 : 4;               // of the buffer: twice the largest k
constexpr int BINS = 2048, BINS_OF_THREAD = BINS / THREADS;
constexpr int MAX_CLUSTER = 8;
constexpr uint32_t MAX_K = 4096;
constexpr uint32_t OUTSIDE = 0;
static_assert(BINS % THREADS == 0 && CAPACITY <= TILE && ITEMS % 4 == 0 && ITEMS <= 32, "");
static_assert(!CLUSTERS || BINS_OF_THREAD == 2, "a thread reads its bins of another CTA as 8 bytes");

struct Shared {
    uint32_t order[CAPACITY];
    int32_t column[CAPACITY];
    uint32_t bins[CLUSTERS ? 3 : 1][BINS];  // those of [0] are all 0 between uses
    uint32_t chosen[2][WARPS];
    int32_t warp_sums[WARPS];
    uint32_t of_cta;  // as in `chosen`, for the other CTAs
    int32_t digit, above, inside;
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

// Who takes part in a step: the CTA, or all CTAs of the row.
enum class Scope { CTA, ROW };

template <Scope SCOPE>
__device__ __forceinline__ void meet() {
#if CLUSTERS
    if constexpr (SCOPE == Scope::ROW) return cluster_sync();
#endif
    __syncthreads();
}

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

// A part's share of a row's range, in whole vectors.
__device__ __forceinline__ Range part_of(const Range& range, int part, int parts) {
    const int size = ceil_div(ceil_div(range.end - range.begin, parts), 4) * 4;
    const int64_t begin = range.begin + int64_t(part) * size;
    return {int(min(begin, int64_t(range.end))), int(min(begin + size, int64_t(range.end)))};
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

// A thread's logits of a tile, on their way. The items of all threads are numbered by warp, vector, lane, and place in
// the vector.
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
        const int64_t start = row * p.logits_stride;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int at = first + first_of_vector(v);
            float4 x = {0, 0, 0, 0};
            if (p.aligned && at + 4 <= p.width) {
                if (at < range.end) x = logits_at(p, start + at);
            } else {
                if (at < range.end) x.x = logit_at(p, start + at);
                if (at + 1 < range.end) x.y = logit_at(p, start + at + 1);
                if (at + 2 < range.end) x.z = logit_at(p, start + at + 2);
                if (at + 3 < range.end) x.w = logit_at(p, start + at + 3);
            }
            vector[v] = x;
        }
    }
};

// The orders of a thread's items, numbered as those of a tile.
struct Items {
    uint32_t order[VECTORS][4];
    int vectors;  // of the warp, the others have nothing inside the range

    __device__ __forceinline__ uint32_t operator[](int i) const { return order[i / 4][i % 4]; }

    __device__ __forceinline__ void count(int items) {
        const int rest = items - Tile::first_of_warp_vector(0);
        vectors = max(0, min(ceil_div(rest, 128), VECTORS));
    }

    __device__ __forceinline__ void set(const Tile& tile, const Range& range, int first) {
        count(range.end - first);
        const bool whole = range.begin <= first && range.end - first >= Tile::first_of_warp_vector(VECTORS);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const float4& x = tile.vector[v];
            const float of_vector[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) order[v][i] = order_of(of_vector[i]);
        }
        if (whole) return;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int at = first + Tile::first_of_vector(v);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (at + i < range.begin || range.end <= at + i) order[v][i] = OUTSIDE;
            }
        }
    }

    // The first `items` of the buffer.
    __device__ __forceinline__ void set_buffered(int items) {
        count(items);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int at = Tile::first_of_vector(v);
            uint4 four = {0, 0, 0, 0};
            if (at < items) four = *reinterpret_cast<const uint4*>(&shared().order[at]);
            const uint32_t orders[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) order[v][i] = at + i < items ? orders[i] : OUTSIDE;
        }
    }
};

// --- selection ------------------------------------------------------------------------------------------------

// Chosen are items of a larger order, and the first `ties` of the same.
struct Threshold {
    uint32_t order;
    int ties;
};

// A thread's bins, the highest first. Those of a CTA alone are cleared, those of a row stay.
template <Scope SCOPE>
__device__ __forceinline__ void take_bins(uint32_t (&all)[BINS], uint32_t (&mine)[BINS_OF_THREAD]) {
    uint32_t* const lowest = &all[BINS - (threadIdx.x + 1) * BINS_OF_THREAD];
#if CLUSTERS
    if constexpr (SCOPE == Scope::ROW) {
        const int parts = num_parts();
        Vec8 of_part[MAX_CLUSTER];
#pragma unroll
        for (int part = 0; part < MAX_CLUSTER; ++part) {
            of_part[part] = {0, 0};
            if (part < parts) of_part[part] = load_cluster_8(cluster_address(shared_address(lowest), part));
        }
        mine[0] = mine[1] = 0;
#pragma unroll
        for (int part = 0; part < MAX_CLUSTER; ++part) {
            mine[0] += of_part[part].y;
            mine[1] += of_part[part].x;
        }
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; ++i) {
        mine[i] = lowest[BINS_OF_THREAD - 1 - i];
        lowest[BINS_OF_THREAD - 1 - i] = 0;
    }
}

// Finds the bin, from the top, in which the `need`-th largest item is: shared().digit, items in the bins above it, and
// in it.
template <Scope SCOPE>
__device__ __forceinline__ void find_bin(uint32_t (&all)[BINS], int need) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t bins[BINS_OF_THREAD];
    take_bins<SCOPE>(all, bins);
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

// The threshold that the k largest items meet, of at least k inside the range.
template <Scope SCOPE>
__device__ __forceinline__ Threshold find_threshold(const Items& items, int k) {
    uint32_t prefix = 0;  // the upper bits of the k-th largest item's order
    int need = k;
    constexpr int WIDTHS[3] = {11, 11, 10};
    int shift = 32;
#pragma unroll
    for (int pass = 0; pass < 3; ++pass) {
        const int above = shift;
        shift -= WIDTHS[pass];
        auto& bins = shared().bins[SCOPE == Scope::ROW && CLUSTERS ? pass : 0];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (v >= items.vectors) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t order = items.order[v][i];
                const bool agrees = pass == 0 || order >> above == prefix;
                if (agrees) atomicAdd(&bins[order >> shift & ((1u << WIDTHS[pass]) - 1)], 1u);
            }
        }
        meet<SCOPE>();
        find_bin<SCOPE>(bins, need);
        prefix = prefix << WIDTHS[pass] | shared().digit;
        need -= shared().above;
        // All items of the bin are chosen: the threshold is just below it.
        if (shared().inside == need) return {max(prefix << shift, 1u) - 1, 0};
    }
    return {prefix, need};
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
    int total;      // of the CTA

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

    // Calls act(place, vector, item in it) for each chosen item of this thread.
    template <typename Act>
    __device__ __forceinline__ void for_each(Act act) const {
        if (!__any_sync(~0u, mask != 0)) return;
        Counts totals;
        const Counts sums = before_vectors(mask, totals);
        int place = before;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            int at = place + sums.of(v);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (mask >> (4 * v + i) & 1) act(at++, v, i);
            place += totals.of(v);
        }
    }
};

// How many items are larger than the threshold and how many equal to it, in 16 bits each. The equal ones of a whole row
// may be more than that holds; more than k of them are never wanted.
struct Both {
    uint32_t counts;

    __device__ __forceinline__ int larger() const { return counts & 0xffff; }
    __device__ __forceinline__ int equal() const { return counts >> 16; }
};

// Of the CTAs before this one.
template <Scope SCOPE>
__device__ __forceinline__ Both in_parts_before(const Both& mine) {
#if CLUSTERS
    if constexpr (SCOPE == Scope::ROW) {
        if (threadIdx.x == 0) shared().of_cta = mine.larger() | min(uint32_t(mine.equal()), MAX_K) << 16;
        meet<SCOPE>();
        const int lane = threadIdx.x % 32;
        uint32_t other = 0;
        if (lane < this_part()) other = load_cluster_4(cluster_address(shared_address(&shared().of_cta), lane));
        return {__reduce_add_sync(~0u, other)};
    }
#endif
    return {0};
}

// Called by the CTA. `turn` alternates between 0 and 1 from call to call.
template <Scope SCOPE>
__device__ __forceinline__ Chosen choose(const Items& items, const Threshold& threshold, int turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t larger = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        larger |= uint32_t(items[i] > threshold.order) << i;
        equal |= uint32_t(items[i] == threshold.order) << i;
    }
    if (threshold.ties == 0) equal = 0;
    const Both of_warp = {__reduce_add_sync(~0u, __popc(larger) | __popc(equal) << 16)};
    if (lane == 0) shared().chosen[turn][warp] = of_warp.counts;
    __syncthreads();
    const uint32_t of_lane = lane < WARPS ? shared().chosen[turn][lane] : 0;
    const Both all = {__reduce_add_sync(~0u, of_lane)};
    const Both parts = in_parts_before<SCOPE>(all);
    const Both before = {__reduce_add_sync(~0u, lane < warp ? of_lane : 0) + parts.counts};
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
    return {larger, before.larger() + min(before.equal(), threshold.ties),
            all.larger() + min(all.equal(), threshold.ties)};
}

// --- the buffer -----------------------------------------------------------------------------------------------

// Keeps the k largest of the buffer's items, in order. Returns the threshold.
__device__ __forceinline__ Threshold cut_buffer(int count, int k, int turn) {
    __syncthreads();  // the buffer is complete
    Items items;
    items.set_buffered(count);
    const Threshold threshold = find_threshold<Scope::CTA>(items, k);
    const Chosen chosen = choose<Scope::CTA>(items, threshold, turn);
    int32_t columns[VECTORS][4];
    chosen.for_each([&](int, int v, int i) { columns[v][i] = shared().column[Tile::first_of_vector(v) + i]; });
    __syncthreads();  // all have read what they move
    chosen.for_each([&](int place, int v, int i) {
        shared().order[place] = items.order[v][i];
        shared().column[place] = columns[v][i];
    });
    return threshold;
}

// Brings into the buffer what may be among the k largest of a range of more than one tile; `tile` is the first. Returns
// how many items that are.
__device__ __forceinline__ int fill_buffer(const TopkParams& p, int row, const Range& range, int first, Tile& tile) {
    int count = 0, turn = 0;
    uint32_t least = OUTSIDE;  // items that are not larger are not chosen
    while (first < range.end) {
        Items items;
        items.set(tile, range, first);
        if (first + TILE < range.end) tile.load(p, row, range, first + TILE);
        Chosen chosen = choose<Scope::CTA>(items, {least, 0}, turn ^= 1);
        const bool fits = count + chosen.total <= CAPACITY;
        if (!fits && count > p.k) {
            least = max(least, cut_buffer(count, p.k, turn ^= 1).order);
            count = p.k;
            tile.load(p, row, range, first);
            continue;
        }
        if (!fits || count == 0) {  // only the k largest of the tile
            const Threshold threshold = find_threshold<Scope::CTA>(items, p.k);
            chosen = choose<Scope::CTA>(items, threshold, turn ^= 1);
            least = max(least, threshold.order);
        }
        chosen.for_each([&](int place, int v, int i) {
            shared().order[count + place] = items.order[v][i];
            shared().column[count + place] = first + Tile::first_of_vector(v) + i;
        });
        count += chosen.total;
        first += TILE;
    }
    __syncthreads();  // the buffer is complete
    return count;
}

// --- results --------------------------------------------------------------------------------------------------

// Where results go: `place` counts from 0.
struct Results {
    int32_t* to;
    int32_t start;          // subtracted from columns
    const int32_t* blocks;  // the request's row of the block table; null: positions

    __device__ __forceinline__ void store(const TopkParams& p, int place, int32_t column) const {
        const int32_t position = column - start;
        if (p.table.blocks == nullptr) {
            to[place] = position;
            return;
        }
        const Position at = find_position(p.table, position);
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
            results.store(p, place, range.begin + place);
        } else {
            results.to[place] = -1;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) topk(const __grid_constant__ TopkParams p) {
    const int parts = num_parts(), part = this_part(), row = blockIdx.x / parts;
    constexpr int ALL_BINS = sizeof(Shared::bins) / sizeof(uint4);
    for (int i = threadIdx.x; i < ALL_BINS; i += THREADS) reinterpret_cast<uint4*>(shared().bins)[i] = {0, 0, 0, 0};
    wait_for_earlier_kernels();
    const Range of_row = range_of_row(p, row);
    if (of_row.end - of_row.begin <= p.k) {
        if (part == 0) choose_all(p, results_of(p, row, of_row), of_row);
        return;
    }
    const Range range = part_of(of_row, part, parts);
    const int first = range.begin / 4 * 4;
    Tile tile;
    tile.load(p, row, range, first);
    __syncthreads();  // bins are 0
    Items items;
    const bool buffered = BUFFERED && first + TILE < range.end;
    if (buffered) {
        items.set_buffered(fill_buffer(p, row, range, first, tile));
    } else {
        items.set(tile, range, first);
    }
    const Threshold threshold = find_threshold<Scope::ROW>(items, p.k);
    const Chosen chosen = choose<Scope::ROW>(items, threshold, 0);
    const Results results = results_of(p, row, of_row);
    chosen.for_each([&](int place, int v, int i) {
        const int item = Tile::first_of_vector(v) + i;
        results.store(p, place, buffered ? shared().column[item] : first + item);
    });
    meet<Scope::ROW>();  // until all have read this CTA's shared memory
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = sizeof(Shared);
