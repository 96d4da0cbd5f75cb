// Ranges of a row, and the logits of one in registers.
#pragma once
#include "indexer/order.cuh"
#include "indexer/topk/shared.cuh"
#include "ptx/arithmetic.cuh"
#include "tile/warp.cuh"

// A part's share of a row's range, cut at whole vectors.
__device__ __forceinline__ Range part_of(const Range& range, int part, int parts) {
    const int base = range.begin / 4 * 4, size = ceil_div(ceil_div(range.end - base, parts), 4) * 4;
    const int64_t begin = base + int64_t(part) * size;
    return {max(int(min(begin, int64_t(range.end))), range.begin), int(min(begin + size, int64_t(range.end)))};
}

__device__ __forceinline__ float logit_at(const TopkParams& p, int64_t at) {
    if constexpr (BF16) return bf16_to_float(static_cast<const bf16*>(p.logits)[at]);
    return static_cast<const float*>(p.logits)[at];
}

// Four neighbouring logits.
__device__ __forceinline__ float4 logits_at(const TopkParams& p, int64_t at) {
    if constexpr (BF16) {
        const Vec8 v = *reinterpret_cast<const Vec8*>(static_cast<const bf16*>(p.logits) + at);
        return {bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y)};
    }
    return *reinterpret_cast<const float4*>(static_cast<const float*>(p.logits) + at);
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
