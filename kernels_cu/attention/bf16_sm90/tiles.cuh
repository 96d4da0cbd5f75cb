// Part of bf16_sm90: which tiles of a list the producers copy (K::SKIPS). A producer calls load_first, which starts
// loads; then, while these are under way, it copies Q; then `begin`. After that, for each pair: any_valid, find_more,
// and take_tile for the next even and odd tile.
#pragma once
#include "attention/bf16_sm90/kinds.cuh"

// Whether a list entry names a row.
__device__ __forceinline__ bool is_valid(const AttentionParams& p, int32_t slot) {
    return uint32_t(slot) < uint32_t(min(p.main.num_slots, int64_t(0x7fffffff)));
}

// Each producer warp passes a number; all get the four numbers.
__device__ __forceinline__ Vec16 exchange(uint32_t (&numbers)[4], uint32_t mine) {
    named_barrier_sync(PRODUCER_SYNC, WARPGROUP);  // all have read the numbers of the last exchange
    if (threadIdx.x % 32 == 0) numbers[threadIdx.x / 32 % 4] = mine;
    named_barrier_sync(PRODUCER_SYNC, WARPGROUP);
    return {numbers[0], numbers[1], numbers[2], numbers[3]};
}

// Skips::NONE: all tiles of a list.
template <typename K, Skips SKIPS = K::SKIPS>
struct Tiles {
    int next, end;

    // Starts the loads that `begin` needs.
    __device__ __forceinline__ int32_t load_first(const typename K::Params& p, const Work& w, const Copier& c,
                                                  int32_t (&even)[4], int32_t (&odd)[4]) {
        K::template load_slots<K>(p, w, c, 0, even);
        K::template load_slots<K>(p, w, c, 1, odd);
        return 0;
    }
    // Finds the first two tiles. Returns whether there may be any.
    __device__ __forceinline__ bool begin(const typename K::Params&, Work& w, const Copier&, int32_t, int32_t (&)[4],
                                          int32_t (&)[4]) {
        next = 2;
        end = 2 * w.pairs;
        return end > 0;
    }
    // Whether more tiles may follow the current pair.
    __device__ __forceinline__ bool find_more(const typename K::Params&, const Work&) { return next < end; }
    // The next tile's number.
    __device__ __forceinline__ int take_tile(const Work&) { return next++; }
    // Whether any entry of a pair is valid. Each thread passes its entries of both tiles.
    __device__ __forceinline__ bool any_valid(const typename K::Params&, const int32_t (&)[4], const int32_t (&)[4]) {
        return true;
    }
};

// Skips::VOTED: all pairs up to the list's end. The producer warps vote on each pair.
template <typename K>
struct Tiles<K, Skips::VOTED> : Tiles<K, Skips::NONE> {
    using All = Tiles<K, Skips::NONE>;

    __device__ __forceinline__ int32_t load_first(const typename K::Params& p, const Work& w, const Copier& c,
                                                  int32_t (&even)[4], int32_t (&odd)[4]) {
        All::load_first(p, w, c, even, odd);
        return K::load_last_entry(p, w);
    }
    __device__ __forceinline__ bool begin(const typename K::Params& p, Work& w, const Copier& c, int32_t last_entry,
                                          int32_t (&even)[4], int32_t (&odd)[4]) {
        if (K::shorten_list(p, w, last_entry)) load_first(p, w, c, even, odd);
        return All::begin(p, w, c, last_entry, even, odd);
    }
    __device__ __forceinline__ bool any_valid(const typename K::Params& p, const int32_t (&even)[4],
                                              const int32_t (&odd)[4]) {
        uint32_t least = 0xffffffff;  // valid entries are the least unsigned numbers
#pragma unroll
        for (int i = 0; i < 4; ++i) least = min(least, min(uint32_t(even[i]), uint32_t(odd[i])));
        return named_barrier_any(PRODUCER_SYNC, WARPGROUP, is_valid(p, int32_t(least)));
    }
};

// Skips::MARKED: the tiles with a valid entry. MARKED_AT_ONCE tiles are scanned and marked at a time.
constexpr int MARKED_AT_ONCE = 32;
template <typename K>
struct Tiles<K, Skips::MARKED> {
    int first;      // of the tiles that are marked now
    uint32_t left;  // a bit for each marked tile that has not been taken

    // A producer warp loads the entries of every fourth of these tiles.
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
    // Marks the tiles; all producer warps exchange their marks.
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
    // Before and after the copies of Q, as above.
    __device__ __forceinline__ Entries load_first(const typename K::Params& p, const Work& w, const Copier&,
                                                  int32_t (&)[4], int32_t (&)[4]) {
        first = 0;
        return load(p, w);
    }
    __device__ __forceinline__ bool begin(const typename K::Params& p, Work& w, const Copier& c,
                                          const Entries& entries, int32_t (&even)[4], int32_t (&odd)[4]) {
        mark(p, w, entries);
        if (left == 0 && w.length > MARKED_AT_ONCE * TILE_ROWS)
            left = 1;  // later tiles may be valid: begin with one that is not
        if (left == 0) w.length = 0;
        const bool any = left != 0;
        K::template load_slots<K>(p, w, c, take_tile(w), even);
        K::template load_slots<K>(p, w, c, take_tile(w), odd);
        return any;
    }
    // If all marked tiles are taken, marks later ones, until one has a valid entry. Returns whether there is one.
    __device__ __forceinline__ bool find_more(const typename K::Params& p, const Work& w) {
#pragma unroll 1
        while (left == 0 && (first + MARKED_AT_ONCE) * TILE_ROWS < w.length) {
            first += MARKED_AT_ONCE;
            mark(p, w, load(p, w));
        }
        return left != 0;
    }
    // The next marked tile; if there is none, a number after the list's last tile.
    __device__ __forceinline__ int take_tile(const Work& w) {
        const int tile = left == 0 ? w.length : first + __ffs(left) - 1;
        left &= left - 1;
        return tile;
    }
    __device__ __forceinline__ bool any_valid(const typename K::Params&, const int32_t (&)[4], const int32_t (&)[4]) {
        return true;
    }
};

// Finds where a list of `length` entries ends: behind the last valid entry. All producer warps search, AT_ONCE entries
// a lane at a time.
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
