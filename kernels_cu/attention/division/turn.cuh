// A turn: what a CTA works on at a time. It is a split of a work item, which is a query and a tile of HEADS heads.
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

// Of its split, tiles begin, begin + step, ... before end. IN_TURN: an item's tiles are dealt out to its splits in turn;
// else they are neighbours, and `step` is 1.
template <bool IN_TURN>
struct TurnOf : WorkItem {
    int step, dealt;
    bool ends_item;  // no later split of the item is another CTA's, or a later turn's

    __device__ __forceinline__ int count() const { return IN_TURN ? dealt : end - begin; }
    __device__ __forceinline__ int tile(int i) const { return begin + step * i; }
};

// What becomes of a turn's result.
enum class End {
    STORE,    // it is the item's result
    LEAVE,    // a partial result is left to the CTA that has the item's end, which adds it to its own
    MEET,     // the CTAs of an item leave partial results to one another, meet, and merge a share of the output each
    KEEP,     // the CTA has all splits of the item, one after the other, and merges them after the last
    COMBINE,  // a partial result is left for combine.cu
};

// A division whose turns follow from a CTA's place in the grid: nothing is found before them, and nothing kept.
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
        static_assert(sizeof(Work) == 0, "found by the division, or by the kernel");
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

// Split `split` of `splits`. The first few have a tile more than the others.
__device__ __forceinline__ void find_item(const AttentionParams& p, WorkItem& w, int query, int head_tile,
                                          uint32_t split, uint32_t splits) {
    w.query = query_by_branch(p, query);
    w.first_head = head_tile * HEADS;
    const uint32_t tiles = find_lists(p, w), each = tiles / splits, more = tiles % splits;
    w.begin = split * each + min(split, more);
    w.end = w.begin + each + (split < more);
}

// All of a work item.
template <bool IN_TURN>
__device__ __forceinline__ void find_whole_item(const AttentionParams& p, TurnOf<IN_TURN>& w, int query,
                                                int head_tile) {
    find_item(p, w, query, head_tile, 0, 1);
    w.ends_item = true;
    w.step = 1;
}

// Number split() of an item's splits() equal ones. IN_TURN: they are equal where a list ends with -1, too, without a look
// at it. Both numbers are read where they are needed: they may stand in special registers.
template <bool IN_TURN, typename Split, typename Splits>
__device__ __forceinline__ void find_equal_split(const AttentionParams& p, TurnOf<IN_TURN>& w, int query,
                                                 int head_tile, Split split, Splits splits) {
    if constexpr (IN_TURN) {
        find_whole_item(p, w, query, head_tile);
        w.begin = min(split(), w.end);
        w.step = splits();
        w.dealt = ceil_div(w.end - w.begin, w.step);
    } else {
        find_item(p, w, query, head_tile, split(), splits());
        w.ends_item = true;
        w.step = 1;
    }
}
// Lists of V32_FP8 and V32_NVFP4, which are long, often end with -1.
constexpr bool TILES_IN_TURN = Row::FOLDED_SCALES != 0 || ROPE_CODED;

// The list entry of row `row` of a tile, -1 where there is none. The entry is not looked at here, so that nothing
// waits for it before it is used.
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
