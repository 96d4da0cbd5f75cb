// Loads of logits, and the items of a CTA in registers, as keys.
#pragma once
#include "indexer/radix_key.cuh"
#include "indexer/topk/shared.cuh"
#include "ptx/arithmetic.cuh"
#include "tile/warp.cuh"

// The part of a range that CTA number `part` has. Parts are cut at whole vectors.
__device__ __forceinline__ Range part_of(const Range& range, int part, int parts) {
    const int base = range.begin / 4 * 4, size = ceil_div(ceil_div(range.end - base, parts), 4) * 4;
    const int64_t begin = base + int64_t(part) * size;
    return {max(int(min(begin, int64_t(range.end))), range.begin), int(min(begin + size, int64_t(range.end)))};
}

__device__ __forceinline__ float logit_at(const TopkParams& p, int64_t at) {
    if constexpr (BF16) return bf16_to_float(static_cast<const bf16*>(p.logits)[at]);
    return static_cast<const float*>(p.logits)[at];
}

// A vector: four neighbouring logits by one load.
__device__ __forceinline__ float4 logits_at(const TopkParams& p, int64_t at) {
    if constexpr (BF16) {
        const Vec8 v = *reinterpret_cast<const Vec8*>(static_cast<const bf16*>(p.logits) + at);
        return {bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y)};
    }
    return *reinterpret_cast<const float4*>(static_cast<const float*>(p.logits) + at);
}

// The four logits from column `at` on of the row that begins at `start`; `outside` in place of those outside of
// `range`.
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

// A thread's logits of a part that registers hold, as loads bring them. A warp has VECTORS * 128 neighbouring columns:
//
//   warp 0: vector 0 of lanes 0 .. 31 | vector 1 of lanes 0 .. 31 | ...    warp 1: ...
//
// So columns ascend by warp, vector, lane, and place in the vector.
struct Tile {
    float4 vector[VECTORS];

    // Columns from the tile's first one to vector `v` of the warp, and to that of this thread.
    static __device__ __forceinline__ int first_of_warp_vector(int v) {
        return threadIdx.x / 32 * (VECTORS * 128) + v * 128;
    }
    static __device__ __forceinline__ int first_of_vector(int v) {
        return first_of_warp_vector(v) + threadIdx.x % 32 * 4;
    }

    // The tile from column `first` on, a multiple of 4. It does not look where the range begins, and may load logits
    // behind its end: Items::set takes out what is outside of the range.
    __device__ __forceinline__ void load(const TopkParams& p, int row, const Range& range, int first) {
        const int thread_first = first + first_of_vector(0);
        const int64_t from = row * p.logits_stride + thread_first;
        if (p.aligned && first + first_of_warp_vector(VECTORS) <= range.end) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) vector[v] = logits_at(p, from + v * 128);
            return;
        }
        // Whole vectors first, so that their loads are under way together.
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

// Whether a loop over a thread's vectors asks, before vector `v`, if there are any more. A branch before each costs
// time. STREAMED asks before each: a pool is mostly filled in part, and then no warp has the last vectors. Other
// variants ask before the first one only: behind a row's end most warps have no vectors at all.
__device__ constexpr bool checks_end_at(int v) { return STREAMED || v == 0; }

// The keys of a thread's items.
struct Items {
    uint32_t key[VECTORS][4];
    int vectors;  // those behind have nothing inside the range

    __device__ __forceinline__ uint32_t operator[](int i) const { return key[i / 4][i % 4]; }

    // Calls act(key) for each item.
    template <typename Act>
    __device__ __forceinline__ void for_each(Act act) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (checks_end_at(v) && v >= vectors) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) act(key[v][i]);
        }
    }

#if ORDERED
    // The items for which test(key) is true: bit 4 v + i is item i of vector v.
    template <typename Test>
    __device__ __forceinline__ uint32_t mask_of(Test test) const {
        uint32_t mask = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (v >= vectors) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) mask |= uint32_t(test(key[v][i])) << (4 * v + i);
        }
        return mask;
    }

    // Appends the keys from `least` to before `least + size` to shared().listed_keys. Most threads have none of them.
    __device__ __forceinline__ void list_keys(uint32_t least, uint32_t size) const {
        const uint32_t mask = mask_of([&](uint32_t key) { return key - least < size; });
        if (mask == 0) return;
        int to = atomicAdd(&shared().num_listed, uint32_t(__popc(mask)));
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (mask >> i & 1) shared().listed_keys[to++] = (*this)[i];
        }
    }
#endif

    // From a tile that begins at column `first`.
    __device__ __forceinline__ void set(const Tile& tile, const Range& range, int first) {
        const int rest = range.end - first - Tile::first_of_warp_vector(0);  // columns from the warp's first one on
        vectors = max(0, min(ceil_div(rest, 128), VECTORS));
        const bool all_inside = range.begin <= first && rest >= VECTORS * 128;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (checks_end_at(v) && v >= vectors) break;
            const float4& x = tile.vector[v];
            const float of_vector[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) key[v][i] = radix_key_of(of_vector[i]);
        }
        if (all_inside) return;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (checks_end_at(v) && v >= vectors) break;
            const int at = first + Tile::first_of_vector(v);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (at + i < range.begin || range.end <= at + i) key[v][i] = OUTSIDE;
            }
        }
    }

    // Where vector `v` of this thread stands in the pool. Vectors of all threads alternate, so that all warps have as
    // many of them.
    static __device__ __forceinline__ int first_in_pool(int v) { return (v * THREADS + threadIdx.x) * 4; }

    // From a pool of `items` items.
    __device__ __forceinline__ void set_pooled(int items) {
        vectors = ceil_div(items, THREADS * 4);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int at = first_in_pool(v);
            uint4 four = {0, 0, 0, 0};
            if (at < items) four = *reinterpret_cast<const uint4*>(&shared().pool_logits[at]);
            const uint32_t bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) key[v][i] = at + i < items ? radix_key_of(__uint_as_float(bits[i])) : OUTSIDE;
        }
    }
};
