// Of bf16_sm90: which tiles of a list the producers bring, by K::SKIPS.
#pragma once
#include "attention/bf16_sm90/kinds.cuh"

// Whether a list entry names a row.
__device__ __forceinline__ bool is_valid(const AttentionParams& p, int32_t slot) {
    return uint32_t(slot) < uint32_t(min(p.main.num_slots, int64_t(0x7fffffff)));
}

// Each producer warp passes a number; all get the four.
__device__ __forceinline__ Vec16 exchange(uint32_t (&numbers)[4], uint32_t mine) {
    named_barrier_sync(PRODUCER_SYNC, WARPGROUP);  // all have read the numbers before
    if (threadIdx.x % 32 == 0) numbers[threadIdx.x / 32 % 4] = mine;
    named_barrier_sync(PRODUCER_SYNC, WARPGROUP);
    return {numbers[0], numbers[1], numbers[2], numbers[3]};
}

// The tiles of a list: all of them, ...
template <typename K, Skips SKIPS = K::SKIPS>
struct Tiles {
    int next, end;

    // Asks for what is needed first, before Q is copied; behind that it is there.
    __device__ __forceinline__ int32_t ask(const typename K::Params& p, const Work& w, const Copier& c,
                                           int32_t (&even)[4], int32_t (&odd)[4]) {
        K::template load_slots<K>(p, w, c, 0, even);
        K::template load_slots<K>(p, w, c, 1, odd);
        return 0;
    }
    // Finds the first two tiles. Returns whether there may be one.
    __device__ __forceinline__ bool begin(const typename K::Params&, Work& w, const Copier&, int32_t, int32_t (&)[4],
                                          int32_t (&)[4]) {
        next = 2;
        end = 2 * w.pairs;
        return end > 0;
    }
    // Whether more than these two may come.
    __device__ __forceinline__ bool go_on(const typename K::Params&, const Work&) { return next < end; }
    // The next one.
    __device__ __forceinline__ int take(const Work&) { return next++; }
    // Whether an entry of a pair, each thread's of both tiles, is valid.
    __device__ __forceinline__ bool any_valid(const typename K::Params&, const int32_t (&)[4], const int32_t (&)[4]) {
        return true;
    }
};

// ... the pairs for which the producer warps vote, ...
template <typename K>
struct Tiles<K, Skips::VOTED> : Tiles<K, Skips::NONE> {
    using All = Tiles<K, Skips::NONE>;

    __device__ __forceinline__ int32_t ask(const typename K::Params& p, const Work& w, const Copier& c,
                                           int32_t (&even)[4], int32_t (&odd)[4]) {
        All::ask(p, w, c, even, odd);
        return K::load_last(p, w);
    }
    __device__ __forceinline__ bool begin(const typename K::Params& p, Work& w, const Copier& c, int32_t last_entry,
                                          int32_t (&even)[4], int32_t (&odd)[4]) {
        if (K::shorten(p, w, last_entry)) ask(p, w, c, even, odd);
        return All::begin(p, w, c, last_entry, even, odd);
    }
    __device__ __forceinline__ bool any_valid(const typename K::Params& p, const int32_t (&even)[4],
                                              const int32_t (&odd)[4]) {
        uint32_t least = 0xffffffff;  // as unsigned numbers valid entries are the least
#pragma unroll
        for (int i = 0; i < 4; ++i) least = min(least, min(uint32_t(even[i]), uint32_t(odd[i])));
        return named_barrier_any(PRODUCER_SYNC, WARPGROUP, is_valid(p, int32_t(least)));
    }
};

// ... or those that are marked as having a valid entry, MARKED_AT_ONCE tiles at a time.
constexpr int MARKED_AT_ONCE = 32;
template <typename K>
struct Tiles<K, Skips::MARKED> {
    int first;      // of those at a time
    uint32_t left;  // a bit for each that has not been taken

    // A producer warp loads the entries of every fourth of the tiles, ...
    struct Entries {
        int32_t slots[MARKED_AT_ONCE / 4][2];
    };
    __device__ __forceinline__ Entries load(const typename K::Params& p, const Work& w) const {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, entry = (first + warp) * TILE_ROWS + lane;
        const int32_t* list = K::list_of(p, w) + entry;
        Entries entries;
#pragma unroll
        for (int i = 0; i < MARKED_AT_ONCE / 4; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int further = 4 * i * TILE_ROWS + 32 * j;
                entries.slots[i][j] = entry + further < w.length ? list[further] : -1;
            }
        }
        return entries;
    }
    // ... and marks the tiles.
    __device__ __forceinline__ void mark(const typename K::Params& p, const Work& w, const Entries& entries) {
        const int warp = threadIdx.x / 32 % 4;
        uint32_t found = 0;
#pragma unroll
        for (int i = 0; i < MARKED_AT_ONCE / 4; ++i) {
            if (is_valid(p, entries.slots[i][0]) || is_valid(p, entries.slots[i][1])) found |= 1u << 4 * i;
        }
        const Vec16 all = exchange(small<K>().found, __reduce_or_sync(~0u, found) << warp);
        left = all.x | all.y | all.z | all.w;
    }
    // Before and behind the copies of Q. Returns whether there are any, or may be.
    __device__ __forceinline__ Entries ask(const typename K::Params& p, const Work& w, const Copier&, int32_t (&)[4],
                                           int32_t (&)[4]) {
        first = 0;
        return load(p, w);
    }
    __device__ __forceinline__ bool begin(const typename K::Params& p, Work& w, const Copier& c,
                                          const Entries& entries, int32_t (&even)[4], int32_t (&odd)[4]) {
        mark(p, w, entries);
        if (left == 0 && w.length > MARKED_AT_ONCE * TILE_ROWS) left = 1;  // there may be some behind these
        if (left == 0) w.length = 0;
        const bool any = left != 0;
        K::template load_slots<K>(p, w, c, take(w), even);
        K::template load_slots<K>(p, w, c, take(w), odd);
        return any;
    }
    // Goes on to tiles behind until one is marked. Returns whether one is.
    __device__ __forceinline__ bool go_on(const typename K::Params& p, const Work& w) {
#pragma unroll 1
        while (left == 0 && (first + MARKED_AT_ONCE) * TILE_ROWS < w.length) {
            first += MARKED_AT_ONCE;
            mark(p, w, load(p, w));
        }
        return left != 0;
    }
    // Takes the next of the marked tiles, a number behind the list if there is none.
    __device__ __forceinline__ int take(const Work& w) {
        const int tile = left == 0 ? w.length : first + __ffs(left) - 1;
        left &= left - 1;
        return tile;
    }
    __device__ __forceinline__ bool any_valid(const typename K::Params&, const int32_t (&)[4], const int32_t (&)[4]) {
        return true;
    }
};

// Where a list of so many entries ends: behind the last that names a row. The producer warps look, AT_ONCE entries a
// lane at a time.
template <typename K>
__device__ __forceinline__ int find_end(const typename K::Params& p, const int32_t* list, int length) {
    constexpr int AT_ONCE = 16;
    uint32_t end = 0;
#pragma unroll 1
    for (; end == 0 && length > 0; length -= WARPGROUP * AT_ONCE) {
        const int behind = length - int(threadIdx.x % WARPGROUP);
        int32_t entries[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            entries[i] = -1;
            if (behind > i * WARPGROUP) entries[i] = list[behind - i * WARPGROUP - 1];
        }
#pragma unroll
        for (int i = AT_ONCE - 1; i >= 0; --i) {
            if (is_valid(p, entries[i])) end = behind - i * WARPGROUP;
        }
        const Vec16 all = exchange(small<K>().found, __reduce_max_sync(~0u, end));
        end = max(max(all.x, all.y), max(all.z, all.w));
    }
    return end;
}
