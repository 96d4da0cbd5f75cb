// Rows that registers do not hold: a sample, a pool of what may be chosen, and the chosen in the order of their columns.
#pragma once
#include "indexer/topk/threshold.cuh"

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
