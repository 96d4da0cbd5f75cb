// The pool of a long row: in shared memory, all logits of a CTA's part that are larger than the cutoff, with their
// columns.
//
//   step     the CTA reads Step::SIZE neighbouring columns into registers, while it adds those of the step before to
//            the pool
//   a warp   counts its logits above the cutoff, finds room for them by one atomic add, and stores them there
//
// Which warp finds room first is left to chance, so the pool has no order. ORDERED: a warp's columns in a step, a
// chunk, are neighbours. Their items stand in the pool side by side, by columns, and chunks_in_pool tells where.
#pragma once
#include "indexer/topk/items.cuh"

// A thread's logits of a step.
struct Step {
    static constexpr int DEPTH = 4;                   // vectors of a thread
    static constexpr int SIZE = DEPTH * THREADS * 4;  // columns of the CTA
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

    // The logits larger than `cutoff`: bit 4 v + i is logit i of vector v. The sign of cutoff - logit tells, so NaN is
    // not among them.
    __device__ __forceinline__ uint32_t mask_above(float cutoff) const {
        uint32_t larger = 0;
#pragma unroll
        for (int v = 0; v < DEPTH; ++v) {
            const float of_vector[4] = {vector[v].x, vector[v].y, vector[v].z, vector[v].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float difference = subtract_exactly(cutoff, of_vector[i]);
                larger = __funnelshift_l(__float_as_uint(difference), larger, 1);
            }
        }
        return __brev(larger << (32 - 4 * DEPTH));
    }

#if ORDERED
    // Adds the logits larger than `cutoff` of a step that begins at column `first`, if the pool has room for all of
    // this warp. `chunk` is the number of this warp's chunk in the part.
    __device__ __forceinline__ void add_to_pool(float cutoff, int first, int chunk) const {
        const int lane = threadIdx.x % 32;
        const uint32_t mask = mask_above(cutoff);
        uint32_t counts = 0;  // a byte a vector
#pragma unroll
        for (int v = 0; v < DEPTH; ++v) counts |= __popc(mask >> 4 * v & 15) << 8 * v;
        uint32_t in_pool = 0;  // as in chunks_in_pool
        if (__any_sync(~0u, mask != 0)) {
            const uint32_t sums = inclusive_sum(counts, lane), totals = __shfl_sync(~0u, sums, 31);
            const uint32_t before = sums - counts;
            const int total = (totals & 255) + (totals >> 8 & 255) + (totals >> 16 & 255) + (totals >> 24);
            int at = 0;
            if (lane == 0) at = atomicAdd(&shared().num_pooled, uint32_t(total));
            at = __shfl_sync(~0u, at, 0);
            in_pool = at << 16 | total;
            if (at + total <= POOL_CAPACITY) {
#pragma unroll
                for (int v = 0; v < DEPTH; ++v) {
                    const float of_vector[4] = {vector[v].x, vector[v].y, vector[v].z, vector[v].w};
                    int to = at + (before >> 8 * v & 255);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (mask >> (4 * v + i) & 1) {
                            shared().pool_logits[to] = __float_as_uint(of_vector[i]);
                            shared().pool_columns[to++] = first + first_of_vector(v) + i;
                        }
                    }
                    at += totals >> 8 * v & 255;
                }
            }
        }
        if (lane == 0) shared().chunks_in_pool[chunk] = in_pool;
    }
#else
    // Adds the logits larger than `cutoff` of a step that begins at column `first`, if the pool has room for all of
    // this thread.
    __device__ __forceinline__ void add_to_pool(float cutoff, int first, int) const {
        const int lane = threadIdx.x % 32;
        const uint32_t mask = mask_above(cutoff);
        if (!__any_sync(~0u, mask != 0)) return;
        const int mine = __popc(mask), sum = inclusive_sum(mine, lane);
        int at = 0;
        if (lane == 31) at = atomicAdd(&shared().num_pooled, uint32_t(sum));
        at = __shfl_sync(~0u, at, 31) + sum - mine;
        if (at + mine > POOL_CAPACITY) return;
        int to = at;
#pragma unroll
        for (int v = 0; v < DEPTH; ++v) {
            const float of_vector[4] = {vector[v].x, vector[v].y, vector[v].z, vector[v].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (mask >> (4 * v + i) & 1) {
                    shared().pool_logits[to] = __float_as_uint(of_vector[i]);
                    shared().pool_columns[to++] = first + first_of_vector(v) + i;
                }
            }
        }
    }
#endif
};

// Fills the pool from a part. `step` has the logits of its first step. Returns how many logits are larger than
// `cutoff`; if that is more than POOL_CAPACITY, some are missing from the pool. Called by the CTA.
__device__ __forceinline__ int fill_pool(const TopkParams& p, int row, const Range& range, float cutoff, Step step) {
    const int64_t start = row * p.logits_stride;
    int first = range.begin / 4 * 4, chunk = threadIdx.x / 32;  // of a step: WARPS chunks
    while (first < range.end) {
        const Step now = step;
        if (first + Step::SIZE < range.end) step.load(p, start, range, first + Step::SIZE);
        now.add_to_pool(cutoff, first, chunk);
        first += Step::SIZE;
        chunk += WARPS;
    }
    __syncthreads();
    return shared().num_pooled;
}
