// The pool of a long row: all of its logits that are larger than what the sample told, with their columns.
#pragma once
#include "indexer/topk/items.cuh"

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
