// A turn: what a CTA works on at a time. It is a split of a work item; a work item is a query and a tile of HEADS
// heads.
#pragma once
#include "attention/division/lists.cuh"

__device__ __forceinline__ int num_head_tiles(const AttentionParams& p) { return ceil_div(p.h_q, HEADS); }

// Tiles begin .. end - 1 of a query's lists.
struct Split : Lists {
    int begin, end;
};

struct WorkItem : Split {
    int first_head;
};

// A turn has tiles begin, begin + step, ... below `end`, tile_count of them. INTERLEAVED: an item's splits take its
// tiles in turn; else a split's tiles are neighbours, and `step` is 1.
template <bool INTERLEAVED>
struct TurnOf : WorkItem {
    int step, tile_count;
    bool ends_item;  // no later turn, of this CTA or another one, has a later split of the item; END MEET: not used

    __device__ __forceinline__ int count() const { return INTERLEAVED ? tile_count : end - begin; }
    __device__ __forceinline__ int tile(int i) const { return begin + step * i; }
};

// What is done with a turn's result.
enum class End {
    STORE,    // it is the item's result, and is stored
    LEAVE,    // it is a partial result, unless the turn ends its item: then earlier CTAs' partial results are merged
    MEET,     // the CTAs of an item write partial results, meet, and each merges a share of the output
    KEEP,     // the CTA has all splits of the item, one after the other, and merges them after the last
    COMBINE,  // it is a partial result for a later launch (dense_combine.cu), unless it is the whole item's
};

// What divisions have in common by default: one turn, which follows from the CTA's place in the grid, and nothing to
// find or to keep.
struct FromGrid {
    static constexpr bool ONE_TURN = false, EQUAL_SPLITS = false, FOUND_EARLY = false, HAS_WAITED = false;
    static constexpr int SCRATCH_BYTES = 0;
    struct State {};

    template <typename Any>
    static __device__ __forceinline__ void begin(const AttentionParams&, Any&, int) {}
    template <typename Any>
    static __device__ __forceinline__ bool is_idle(const Any&) {
        return false;
    }
    template <typename Any, typename Scratch>
    static __device__ __forceinline__ void finish(const AttentionParams&, Any&, int, Scratch) {}
    template <typename Any>
    static __device__ __forceinline__ void join(const AttentionParams&, const Any&) {}
    template <typename Any>
    static __device__ __forceinline__ int num_turns(const AttentionParams&, const Any&) {
        return 1;
    }
    template <typename Work, typename Any>
    static __device__ __forceinline__ Work find_turn(const AttentionParams&, const Any&, int) {
        static_assert(sizeof(Work) == 0, "the division, or the kernel, has a function of its own");
    }
    static __device__ __forceinline__ int split_of(const AttentionParams&, int) { return 0; }
    template <typename Sync>
    static __device__ __forceinline__ int count_earlier(const AttentionParams&, bool, bool, int, int&, Sync) {
        return 0;
    }
    static __device__ __forceinline__ int wait_for_earlier(const AttentionParams&, int) { return 0; }
    static __device__ __forceinline__ void announce(const AttentionParams&, bool) {}
    static __device__ __forceinline__ void leave() {}
};

// Split `split` of `splits` of a work item. The first splits may have a tile more than the others.
__device__ __forceinline__ void find_item(const AttentionParams& p, WorkItem& w, int query, int head_tile,
                                          uint32_t split, uint32_t splits) {
    w.query = query_by_branch(p, query);
    w.first_head = head_tile * HEADS;
    const uint32_t tiles = find_lists(p, w), each = tiles / splits, more = tiles % splits;
    w.begin = split * each + min(split, more);
    w.end = w.begin + each + (split < more);
}

// A whole work item.
template <bool INTERLEAVED>
__device__ __forceinline__ void find_whole_item(const AttentionParams& p, TurnOf<INTERLEAVED>& w, int query,
                                                int head_tile) {
    find_item(p, w, query, head_tile, 0, 1);
    w.ends_item = true;
    w.step = 1;
}

// Split number split() of an item's splits() equal ones. INTERLEAVED: they have equally many valid tiles even if the
// list ends with -1, and nobody needs to look. The two numbers are functions, because they may be in special
// registers, which are read where they are needed.
template <bool INTERLEAVED, typename Split, typename Splits>
__device__ __forceinline__ void find_equal_split(const AttentionParams& p, TurnOf<INTERLEAVED>& w, int query,
                                                 int head_tile, Split split, Splits splits) {
    if constexpr (INTERLEAVED) {
        find_whole_item(p, w, query, head_tile);
        w.begin = min(split(), w.end);
        w.step = splits();
        w.tile_count = ceil_div(w.end - w.begin, w.step);
    } else {
        find_item(p, w, query, head_tile, split(), splits());
        w.ends_item = true;
        w.step = 1;
    }
}
// Lists over V32_FP8 and V32_NVFP4 are long and often end with -1, so their tiles are interleaved.
constexpr bool INTERLEAVE_TILES = Row::FOLDED_SCALES != 0 || ROPE_CODED;

// Loads the list entry of row `row` of a tile; -1 if there is none. The entry is not used here, so that nothing waits
// for the load.
__device__ __forceinline__ int32_t load_entry(const AttentionParams& p, const Split& w, int tile, int row) {
    const bool extra = tile >= w.main_tiles;
    const Source& source = extra ? p.extra : p.main;
    const int at = (extra ? tile - w.main_tiles : tile) * TILE_ROWS + row;
    const bool listed = tile < w.end && at < (extra ? w.extra_length : w.main_length);
    const int32_t* list = list_of(source, w.query);
    int32_t entry = -1;
    if (listed) entry = list[at];
    return entry;
}
