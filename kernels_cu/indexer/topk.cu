// The k largest logits of each row's range, exact: of equal ones those with lower indices, ascending by position.
//
// A logit's *order* is an integer that is larger for larger logits: 0 outside the range, 1 for NaN, equal for both
// zeros. Everything is done with orders.
//
//   CTA        a row, or a part of a row; reads it once, in tiles of 16 items a thread
//     first    of the first tile the k largest are found (`find_threshold`) and put into the buffer
//     others   items above the threshold are appended. Equal ones are not: k items that are not smaller came before
//     full     when a tile does not fit the buffer, the buffer is cut down to its k largest, and the threshold rises;
//              of a tile that has more than k itself, only its k largest are taken
//     end      the k largest of the buffer are the result
//   find_threshold   the order of the k-th largest by radix: a histogram of the upper 11 bits, then of 11 and of 10 more
//                    bits of the items that agree with it so far
//   in order   items are numbered warp by warp; the place of a chosen one is the number of chosen ones before it, by
//              sums over lanes and warps. No atomics decide about places, so results do not depend on timing
//
// Rows no longer than k are not read. PARTS: results are columns, for another launch that chooses from them.
// CANDIDATES: items are those columns. BF16: logits are bfloat16.
//
// Shared memory: 8 bytes an item of the buffer, 8 KB of histogram, and a few words a warp.
#include "ptx/arithmetic.cuh"
#include "ptx/convert.cuh"
#include "rows/block_table.cuh"
#include "tile/warp.cuh"

// cupy_mla/cuda/structs.py declares the same fields.
struct TopkParams {
    BlockTable table;           // for slots as results; `blocks` is null for positions
    const void* logits;         // [rows, width]
    const int32_t* starts;      // [rows], or null
    const int32_t* ends;        // [rows]; [rows / queries] or [rows / queries, queries] context lengths; or null
    const int32_t* requests;    // [rows] rows of the table; null: row / queries
    const int32_t* candidates;  // [rows, width of candidates] columns, -1 for none
    int32_t* out;               // [rows, k], of parts [rows, parts, k]
    int64_t logits_stride, out_stride, lens_stride;  // items
    int32_t rows, width, k;
    int32_t queries;  // of a request: `ends` are context lengths; 0: they are ends
    int32_t parts;    // of a row; each is worked on by a CTA, or was
    int32_t aligned;  // rows allow loads of four logits
};

constexpr int WARPS = THREADS / 32;
constexpr int VECTORS = 4, TILE = THREADS * VECTORS * 4;  // items
constexpr int CAPACITY = 8192;                            // of the buffer: twice the largest k
constexpr int BINS = 2048, BINS_OF_THREAD = BINS / THREADS;
constexpr uint32_t OUTSIDE = 0;
static_assert(BINS % THREADS == 0 && CAPACITY % (THREADS * 4) == 0 && CAPACITY <= TILE, "");

struct Shared {
    uint32_t order[CAPACITY];
    int32_t column[CAPACITY];
    uint32_t bins[BINS];  // all 0 between uses
    uint32_t chosen[2][WARPS];
    int32_t warp_sums[WARPS];
    int32_t digit, above, inside;
};
extern __shared__ uint4 shared_bytes[];
__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(shared_bytes); }

__device__ __forceinline__ uint32_t order_of(float logit) {
    const uint32_t bits = __float_as_uint(add_exactly(logit, 0.0f));  // -0 becomes +0; every NaN 0x7fffffff
    return (bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u)) + 2;
}

// --- items ----------------------------------------------------------------------------------------------------

// A thread's items of a tile. The items of all threads are numbered by warp, vector, lane, and place in the vector.
struct Items {
    uint32_t order[VECTORS][4];

    static __device__ __forceinline__ int first_of_vector(int v) {
        return threadIdx.x / 32 * (VECTORS * 128) + v * 128 + threadIdx.x % 32 * 4;
    }
};

// What a CTA works on: items [begin, end), which are columns of the logits' row or entries of its candidates.
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

// The columns of a row's items; for candidates, entries of its list.
__device__ __forceinline__ int32_t column_of(const TopkParams& p, int row, int item) {
#if CANDIDATES
    return p.candidates[int64_t(row) * p.parts * p.k + item];
#else
    return item;
#endif
}

// Items from `first` on.
__device__ __forceinline__ void load_tile(const TopkParams& p, int row, const Range& range, int first, Items& items) {
    const int64_t start = row * p.logits_stride;
#if CANDIDATES
#pragma unroll
    for (int i = 0; i < VECTORS * 4; ++i) {
        const int item = first + Items::first_of_vector(i / 4) + i % 4;
        const int column = item < range.end ? column_of(p, row, item) : -1;
        items.order[i / 4][i % 4] = column >= 0 ? order_of(logit_at(p, start + column)) : OUTSIDE;
    }
#else
    float4 x[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int at = first + Items::first_of_vector(v);
        x[v] = {0, 0, 0, 0};
        if (p.aligned && at + 4 <= p.width) {
            if (at < range.end) x[v] = logits_at(p, start + at);
        } else {
            if (at < range.end) x[v].x = logit_at(p, start + at);
            if (at + 1 < range.end) x[v].y = logit_at(p, start + at + 1);
            if (at + 2 < range.end) x[v].z = logit_at(p, start + at + 2);
            if (at + 3 < range.end) x[v].w = logit_at(p, start + at + 3);
        }
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int at = first + Items::first_of_vector(v);
        const float of_vector[4] = {x[v].x, x[v].y, x[v].z, x[v].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool inside = range.begin <= at + i && at + i < range.end;
            items.order[v][i] = inside ? order_of(of_vector[i]) : OUTSIDE;
        }
    }
#endif
}

// --- selection ------------------------------------------------------------------------------------------------

// Chosen are items of a larger order, and the first `ties` of the same.
struct Threshold {
    uint32_t order;
    int ties;
};

// Finds the bin, from the top, in which the `need`-th largest item is: shared().digit, items in the bins above it, and
// in it. Clears the bins. Returns how many items there are.
__device__ __forceinline__ int find_bin(int need) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int highest = BINS - 1 - threadIdx.x * BINS_OF_THREAD;  // of this thread's bins
    uint32_t bins[BINS_OF_THREAD];
    int mine = 0;
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; ++i) {
        bins[i] = shared().bins[highest - i];
        shared().bins[highest - i] = 0;
        mine += bins[i];
    }
    int above = inclusive_sum(mine, lane), total = 0;
    if (lane == 31) shared().warp_sums[warp] = above;
    __syncthreads();
    const int of_warp = lane < WARPS ? shared().warp_sums[lane] : 0;
    total = __reduce_add_sync(~0u, of_warp);
    above += __reduce_add_sync(~0u, lane < warp ? of_warp : 0) - mine;
    if (above < need && need <= above + mine) {
#pragma unroll
        for (int i = 0; i < BINS_OF_THREAD; ++i) {
            if (above < need && need <= above + int(bins[i])) {
                shared().digit = highest - i;
                shared().above = above;
                shared().inside = bins[i];
            }
            above += bins[i];
        }
    }
    __syncthreads();
    return total;
}

// The threshold that the k largest items meet; all items inside the range if there are no more. Called by the CTA.
__device__ __forceinline__ Threshold find_threshold(const Items& items, int k) {
    uint32_t prefix = 0;  // the upper bits of the k-th largest item's order
    int need = k;
    constexpr int WIDTHS[3] = {11, 11, 10};
    int shift = 32;
#pragma unroll
    for (int pass = 0; pass < 3; ++pass) {
        const int above = shift;
        shift -= WIDTHS[pass];
#pragma unroll
        for (int i = 0; i < VECTORS * 4; ++i) {
            const uint32_t order = items.order[i / 4][i % 4];
            const bool agrees = pass == 0 ? order != OUTSIDE : order >> above == prefix && order != OUTSIDE;
            if (agrees) atomicAdd(&shared().bins[order >> shift & ((1u << WIDTHS[pass]) - 1)], 1u);
        }
        __syncthreads();
        const int total = find_bin(need);
        if (pass == 0 && total <= k) return {OUTSIDE, 0};
        prefix = prefix << WIDTHS[pass] | shared().digit;
        need -= shared().above;
        // All items of the bin are chosen: the threshold is just below it.
        if (shared().inside == need) return {max(prefix << shift, 1u) - 1, 0};
    }
    return {prefix, need};
}

// Which of a thread's items are chosen, and how many before them.
struct Chosen {
    uint32_t mask;  // bit 4 v + i: item i of vector v
    int before;     // chosen items of the warps before this one
    int total;

    // The numbers of set bits before each of a thread's vectors in its warp, 8 bits each; and of all vectors.
    static __device__ __forceinline__ uint32_t before_vectors(uint32_t mask, uint32_t& totals) {
        uint32_t counts = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) counts |= __popc(mask >> (4 * v) & 15) << (8 * v);
        const uint32_t sums = inclusive_sum(counts, threadIdx.x % 32);
        totals = __shfl_sync(~0u, sums, 31);
        return sums - counts;
    }

    // Calls act(place, vector, item in it) for each chosen item of this thread.
    template <typename Act>
    __device__ __forceinline__ void for_each(Act act) const {
        uint32_t totals;
        const uint32_t sums = before_vectors(mask, totals);
        int place = before;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            int at = place + (sums >> (8 * v) & 255);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (mask >> (4 * v + i) & 1) act(at++, v, i);
            place += totals >> (8 * v) & 255;
        }
    }
};

// Called by the CTA. `turn` alternates between 0 and 1 from call to call.
__device__ __forceinline__ Chosen choose(const Items& items, const Threshold& threshold, int turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t larger = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < VECTORS * 4; ++i) {
        larger |= uint32_t(items.order[i / 4][i % 4] > threshold.order) << i;
        equal |= uint32_t(items.order[i / 4][i % 4] == threshold.order) << i;
    }
    if (threshold.ties == 0) equal = 0;
    const uint32_t of_warp = __reduce_add_sync(~0u, __popc(larger) | __popc(equal) << 16);
    if (lane == 0) shared().chosen[turn][warp] = of_warp;
    __syncthreads();
    const uint32_t of_lane = lane < WARPS ? shared().chosen[turn][lane] : 0;
    const uint32_t all = __reduce_add_sync(~0u, of_lane), before = __reduce_add_sync(~0u, lane < warp ? of_lane : 0);
    const int left = threshold.ties - int(before >> 16);  // ties for this warp and those behind it
    if (left > 0 && of_warp >> 16 != 0) {
        if (int(of_warp >> 16) <= left) {
            larger |= equal;
        } else {  // some of them
            uint32_t totals;
            const uint32_t sums = Chosen::before_vectors(equal, totals);
            int number = 0;  // of equal items in vectors before
#pragma unroll
            for (int i = 0; i < VECTORS * 4; ++i) {
                const uint32_t in_vector = equal >> (i / 4 * 4) & ((1u << i % 4) - 1);
                const int place = number + (sums >> (i / 4 * 8) & 255) + __popc(in_vector);
                if (equal >> i & 1 && place < left) larger |= 1u << i;
                if (i % 4 == 3) number += totals >> (i / 4 * 8) & 255;
            }
        }
    }
    return {larger, int(before & 0xffff) + min(int(before >> 16), threshold.ties),
            int(all & 0xffff) + min(int(all >> 16), threshold.ties)};
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
    __device__ __forceinline__ void fill(const TopkParams& p, int from) const {
        for (int place = from + threadIdx.x; place < p.k; place += THREADS) to[place] = -1;
    }
};

__device__ __forceinline__ Results results_of(const TopkParams& p, int row) {
#if PARTS
    return {p.out + int64_t(blockIdx.x) * p.k, 0, nullptr};
#else
    const int32_t* blocks = nullptr;
    if (p.table.blocks != nullptr) {
        const int request = p.requests == nullptr ? row / max(p.queries, 1) : p.requests[row];
        if (has_request(p.table, request)) blocks = p.table.blocks + request * p.table.stride;
    }
    return {p.out + row * p.out_stride, range_of_row(p, row).begin, blocks};
#endif
}

// Where items come from: the next tile of the row, or the buffer.
enum class Source { ROW, BUFFER };

__device__ __forceinline__ void load_buffer(int count, Items& items) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int at = Items::first_of_vector(v);
        uint4 four = {0, 0, 0, 0};
        if (at < count) four = *reinterpret_cast<const uint4*>(&shared().order[at]);
        const uint32_t orders[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) items.order[v][i] = at + i < count ? orders[i] : OUTSIDE;
    }
}

// Moves the buffer's chosen items to its front, in order.
__device__ __forceinline__ void keep(const Items& items, const Chosen& chosen) {
    int32_t columns[VECTORS][4];
    chosen.for_each([&](int, int v, int i) { columns[v][i] = shared().column[Items::first_of_vector(v) + i]; });
    __syncthreads();  // all have read what they move
    chosen.for_each([&](int place, int v, int i) {
        shared().order[place] = items.order[v][i];
        shared().column[place] = columns[v][i];
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) topk(const __grid_constant__ TopkParams p) {
    const int row = PARTS ? blockIdx.x / p.parts : blockIdx.x, part = PARTS ? blockIdx.x - row * p.parts : 0;
#if CANDIDATES
    const Range range = {0, p.parts * p.k};
#else
    const Range range = PARTS ? part_of(range_of_row(p, row), part, p.parts) : range_of_row(p, row);
    if (range.end - range.begin <= p.k) {  // all are chosen
        const int count = range.end - range.begin;
        const Results results = results_of(p, row);
        for (int i = threadIdx.x; i < count; i += THREADS) results.store(p, i, range.begin + i);
        results.fill(p, count);
        return;
    }
#endif
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared().bins[i] = 0;
    __syncthreads();

    int first = range.begin / 4 * 4;  // of the next tile
    int count = 0;                    // items in the buffer
    uint32_t least = OUTSIDE;         // items that are not larger are not chosen
    Source source = Source::ROW;
    bool cut = true;  // only the k largest items of the source are wanted
    int turn = 0;
#pragma unroll 1
    while (true) {
        Items items;
        if (source == Source::ROW) {
            load_tile(p, row, range, first, items);
        } else {
            load_buffer(count, items);
        }
        Threshold threshold = {least, 0};
        if (cut) threshold = find_threshold(items, p.k);
        const Chosen chosen = choose(items, threshold, turn ^= 1);
        const bool last = first + TILE >= range.end;
        if (source == Source::ROW && count + chosen.total > CAPACITY) {
            // First the k largest of the tile alone; if these do not fit either, first those of the buffer.
            if (cut || chosen.total <= p.k) source = Source::BUFFER;
            cut = true;
            continue;
        }
        if (source == Source::BUFFER ? first >= range.end : last && count == 0) {
            const Results results = results_of(p, row);
            chosen.for_each([&](int place, int v, int i) {
                const int item = Items::first_of_vector(v) + i;
                const bool buffered = source == Source::BUFFER;
                results.store(p, place, buffered ? shared().column[item] : column_of(p, row, first + item));
            });
            results.fill(p, chosen.total);
            return;
        }
        if (source == Source::BUFFER) {
            keep(items, chosen);
            count = chosen.total;
            source = Source::ROW;
        } else {
            chosen.for_each([&](int place, int v, int i) {
                shared().order[count + place] = items.order[v][i];
                shared().column[count + place] = column_of(p, row, first + Items::first_of_vector(v) + i);
            });
            count += chosen.total;
            first += TILE;
            if (last) source = Source::BUFFER;
        }
        least = max(least, threshold.order);
        cut = count == 0 || source == Source::BUFFER;
        __syncthreads();  // the buffer is complete
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = sizeof(Shared);
