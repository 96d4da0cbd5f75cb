// Finds where the lists of a query end: behind the last valid entry.
#pragma once
#include "attention/division/lists.cuh"

// Sets one or four entries to -1.
__device__ __forceinline__ void clear(int32_t& entry) { entry = -1; }
__device__ __forceinline__ void clear(int4& entries) { entries = make_int4(-1, -1, -1, -1); }

// The least of one or four entries as unsigned numbers. If that is not valid, none is.
__device__ __forceinline__ uint32_t least_of(int32_t entry) { return entry; }
__device__ __forceinline__ uint32_t least_of(const int4& entries) {
    return min(min(uint32_t(entries.x), uint32_t(entries.y)), min(uint32_t(entries.z), uint32_t(entries.w)));
}

// The index of a list's last valid entry, or of one at most three before it (in the same tile); -1 if none is valid.
// Each of `threads` threads, a power of two, has AT_ONCE loads in flight and searches from the list's end on. A warp
// stops when it has found one, so the caller takes the maximum over the warps. Load is int32_t, or int4 if the list
// begins at a multiple of 16 bytes and its length in memory is a multiple of four.
template <typename Load, int AT_ONCE>
__device__ __forceinline__ int find_last(const int32_t* list, int length, uint32_t slots, int thread, int threads) {
    constexpr int WIDTH = sizeof(Load) / sizeof(int32_t);
    const int step = WIDTH * threads, round = AT_ONCE * step;
    int last = -1;
#pragma unroll 1
    for (int first = (length - 1 & -round) + WIDTH * thread; first >= 0 && last < 0; first -= round) {
        Load entries[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = first + i * step;
            clear(entries[i]);
            if (at < length) entries[i] = *reinterpret_cast<const Load*>(list + at);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (least_of(entries[i]) < slots) last = first + i * step;
        }
        last = __reduce_max_sync(~0u, last);
    }
    return last;
}

// Searches the end of a query's lists, first in the extra list, then in the main list. Returns the number of tiles up
// to the last one in which this warp has found a valid entry. WIDE: loads of 16 bytes where the lists allow it, which
// take more registers.
template <int AT_ONCE, bool WIDE>
__device__ __forceinline__ int find_end(const AttentionParams& p, const Lists& w, int thread, int threads) {
    int end = 0;
#pragma unroll 1
    for (int second = w.extra_length > 0; second >= 0 && end == 0; --second) {
        const Source& source = second ? p.extra : p.main;
        const int length = second ? w.extra_length : w.main_length;
        const uint32_t slots = nameable_slots(source);
        const int32_t* list = list_of(source, w.query);
        const bool wide = WIDE && reinterpret_cast<uint64_t>(list) % 16 == 0 && source.topk % 4 == 0;
        const int last = wide ? find_last<int4, AT_ONCE>(list, length, slots, thread, threads)
                              : find_last<int32_t, AT_ONCE>(list, length, slots, thread, threads);
        if (last >= 0) end = (second ? w.main_tiles : 0) + last / TILE_ROWS + 1;
    }
    return end;
}
