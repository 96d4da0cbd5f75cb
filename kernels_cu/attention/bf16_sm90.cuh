// Sparse attention of flat bf16 rows on Hopper (dense: float16 too): wgmma, persistent CTAs, 64 heads at a time. Shared by five kernels,
// which differ in what the 64 lines of Q and the rows of a work item are, and in what is done with its result:
//
//   bf16_sm90.cu           64 heads of a query, all its rows
//   bf16_cluster_sm90.cu   64 heads of a query; the CTAs of a cluster share its rows and merge their results
//   bf16_shares_sm90.cu    64 heads of a query; all rows of the call are divided evenly over the CTAs
//   bf16_grouped_sm90.cu   all heads of several neighbouring queries, the union of their rows
//   dense_sm90.cu          64 of a request's query tokens and heads; its rows, by the block table
//
// Three warpgroups. Tiles of 64 rows go in pairs, an even and an odd one; both are in shared memory at once.
//
//   warpgroup 0 (consumer)              warpgroup 1 (consumer)              warpgroup 2 (producer)
//     S_0 = Q . K_0^T     m64n64k16       S_1 = Q . K_1^T                     Q of the next work item, once both
//     P_0 = 2^(S_0 - ref_0)               O += P_0 . V_0  right half            S of the last pair are done
//     O += P_0 . V_0      m64n256k16        while P_1 = 2^(S_1 - ref_1)       rows of each tile by cp.async, region
//          left half of the columns       O += P_1 . V_1                        by region, as regions are released
//     O += P_1 . V_1
//
//   P_w is in registers where it is computed, and in shared memory, over the RoPE columns of K_w, for the other
//   warpgroup.
//   KEPT steps of k of Q are in registers as well, so that Q . K reads less from shared memory, whose rate is its
//   limit.
//
//   A tile has two regions. Region w is what warpgroup w reads last, columns 256 w .. + 255. Region 1 - w of tile w
//   holds the RoPE columns as well, over which P_w is stored. With D_QK 512 there are no columns behind V: P has a
//   space of its own. Half of a region's rows are released when the first two of four steps of P.V are done, and are
//   copied anew while the other two run; RoPE columns wait for all four, which read P.
//
//   full[tile][region]    copies done      128 arrivals after cp.async; region w of tile w (VOTED: region 0 of both)
//                                          16 x VALIDITY_LANES more, for validity
//   empty[tile][region][half]              half of a region's rows released, by the 4 warps of warpgroup `region`
//   q_full                Q has come       128 arrivals after cp.async, in clusters 256, and 1 for the work item's number
//   q_empty               Q released       the 8 consumer warps; not in clusters
//   P_READY + w           named: P_w is published: warpgroup w arrives, the other one waits
//   CONSUMER_SYNC         named: both consumer warpgroups, at the end of a work item
//   PRODUCER_SYNC         named: the producer warps, which have looked at list entries
//
// Only tiles in which an entry is valid are copied and multiplied. SKIPS says how they are found: MARKED, the producer
// warps look at all entries of a list, those of 32 tiles at a time, while Q is copied; VOTED, they vote on one pair of
// tiles after the other before they copy it; NONE, every tile has one (bf16_grouped_sm90.cu). The consumers are told with
// a tile's validity what follows its pair (`Follows`).
//
// In clusters a CTA has one work item: the consumers, who have nothing else to do, copy Q.
//
// Softmax without a running maximum to exchange: P_w is relative to ref_w, which is published with P_w and never below
// what either warpgroup's accumulators are relative to; who multiplies P_w first brings them to ref_w. In the first pair
// ref_w rises to a tile's largest logit whenever that is larger; later only where it is larger by REF_SLACK, or where its
// P would be more than PEAK of what the sum will have become by the end of the list, guessed from the rows so far. (The
// largest P is then 1, which bf16 holds exactly; where few rows take the softmax, rounding it is the largest error.)
// Unless few rows do, it hardly ever rises behind the first tiles. Sums only grow: what a logit has to pass is computed
// anew only when one passes what that was the last time.
//
// Shared memory: Q 73,728 + 2 tiles of 73,728 (D_QK 576) or 3 x 65,536 + P 16,384 (D_QK 512), and about 3 KB;
// bf16_grouped_sm90 4 KB more.
// Registers: 232 a consumer thread, 40 a producer thread, together the 384 x 168 of the launch; no spills in loops over
// tiles, and no wgmma serialised by the compiler (the compile test looks at both).
// What was tried, what bounds it: docs/kernels/bf16_sm90.md.
#pragma once
#include "attention/division/results.cuh"
#include "attention/division/whole.cuh"
#include "attention/params.cuh"
#include "attention/role.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "rows/chunk.cuh"
#include "rows/items.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

constexpr int LINES = 64;  // of Q, S and O: the heads of a work item, and padding
static_assert(HEADS <= LINES && HEADS % 16 == 0 && TILE_ROWS == 64, "whole warps have only padding");
constexpr int BLOCKS = D_QK / 64;  // column blocks of 64 values: 64 swizzled lines of 128 bytes
constexpr int BLOCK_BYTES = TILE_ROWS * LINE_BYTES;
constexpr int TILE_BYTES = BLOCKS * BLOCK_BYTES;
constexpr bool P_OVER_ROPE = D_QK > D_V;
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
constexpr Values ITEMS = HALF_ITEMS ? Values::F16 : Values::BF16;
// References are this far below the logit that set them. float16: P is at most 2^15 then, and the smallest that is not 0
// is 2^-31 of P at the reference.
constexpr float REF_BELOW = HALF_ITEMS ? 7.0f : 0.0f;
constexpr float REF_SLACK = 8.0f + REF_BELOW, PEAK = 0.0625f;

// Named barriers; P_READY: + tile.
enum NamedBarrier { P_READY = 1, CONSUMER_SYNC = 3, PRODUCER_SYNC = 4 };

// Shared memory: Q, two tiles, P of each (D_QK 512), what a kernel needs besides (K::EXTRA_BYTES), and the rest.
constexpr int Q_AT = 0, TILE_AT = TILE_BYTES, P_AT = 3 * TILE_BYTES;
constexpr int EXTRA_AT = P_AT + (P_OVER_ROPE ? 0 : 2 * BLOCK_BYTES);

struct Small {
    uint64_t full[2][2], empty[2][2][2], q_full, q_empty;
    // What Q is of: the number of a work item, -1 behind the last, and its list's length, 0 without a valid entry.
    int work, length;
    int follows[2];     // what follows a tile's pair (Follows)
    uint32_t found[4];  // by each producer warp: which of 32 tiles have a valid entry, or where a list ends
    union {
        uint8_t valid[2][TILE_ROWS];  // whether a row of a tile is valid
        // Bf16_grouped_sm90: for each query, a bit for each row of a tile that counts twice.
        uint64_t twice[2][8];
    };
    float ref[2][LINES];     // what P_w is relative to
    float sum[2][2][LINES];  // at the end, alternating between work items: sums and maxima of each warpgroup's tiles
    float max[2][2][LINES];
};

extern __shared__ __align__(1024) uint8_t shared[];

template <typename K>
__device__ __forceinline__ Small& small() {
    return *reinterpret_cast<Small*>(shared + EXTRA_AT + K::EXTRA_BYTES);
}
template <typename K>
constexpr int SHARED_BYTES = EXTRA_AT + K::EXTRA_BYTES + int(sizeof(Small));

__device__ __forceinline__ uint32_t tile_address(int tile) {
    return shared_address(shared) + TILE_AT + tile * TILE_BYTES;
}
__device__ __forceinline__ uint32_t p_address(int tile) {
    return P_OVER_ROPE ? tile_address(tile) + 8 * BLOCK_BYTES : shared_address(shared) + P_AT + tile * BLOCK_BYTES;
}
__device__ __forceinline__ void sync_consumers() { named_barrier_sync(CONSUMER_SYNC, CONSUMERS); }

struct Work {
    Query query;
    int head_tile, length, pairs;  // entries of the list, pairs of tiles
    int number;                    // of a query group, which has no query of its own
    int first;                     // of a split: the first of the entries
    const int32_t* list;           // in clusters: all entries of the list, and how many they are
    int listed;
};

__device__ __forceinline__ int num_pairs(int length) { return (length + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS); }

// Whether region `region` of a tile holds the RoPE columns too, over which P of the tile is stored.
constexpr __device__ bool has_rope(int tile, int region) { return P_OVER_ROPE && region != tile; }

// How tiles without a valid entry are passed over, and what the consumers are told: behind this pair come more, or may
// come; none; the pair is none, the work item has ended with the one before.
enum class Skips { NONE, MARKED, VOTED };
enum Follows { MORE = 0, LAST = 1, ENDED = 2 };

// Whether its barriers also cover the validity of the tile's rows, which the warpgroup that computes S of the tile
// reads; before it multiplies if pairs are voted on, as there may be none.
template <typename K>
constexpr __device__ bool has_validity(int tile, int region) {
    return region == (K::SKIPS == Skips::VOTED ? 0 : tile);
}

// A producer thread copies 16-byte chunk `lane % 8` of rows row + 16 i, i = 0 .. 3, of every column block.
struct Copier {
    int warp, lane, row;
    uint32_t at;      // of the chunk of row `row` of Q, in shared memory
    uint64_t policy;  // of copies, if K::POLICY

    // `warp`: of the warpgroup.
    template <typename K>
    static __device__ __forceinline__ Copier here(const typename K::Params& p, int warp) {
        Copier c;
        if constexpr (K::POLICY) c.policy = K::read_once(p) ? evict_first() : evict_normal();
        c.warp = warp;
        c.lane = threadIdx.x % 32;
        c.row = 4 * c.warp + c.lane / 8;
        // 16 rows further the swizzle is the same. Opaque: in sums of it with uniform registers the addresses of copies
        // came out wrong (docs/kernels/bf16_cluster_sm90.md).
        c.at = opaque(swizzled(shared_address(shared) + Q_AT, c.row, c.lane % 8));
        return c;
    }
};

// --- kinds ----------------------------------------------------------------------------------------------------

// A kernel's `K` has:
//   Params, EXTRA_BYTES
//   KEPT                 steps of k whose part of Q a consumer warpgroup keeps in registers
//   CLUSTER              whether a CTA belongs to a cluster, and has one work item
//   POLICY, read_once    whether rows that are read once leave L2 before others, and whether they are
//   SKIPS                how tiles without a valid entry are passed over
//   load_last, shorten   VOTED: what tells whether the list ends with a row, and making it end there
//   OVERLAPS, start      whether the launch overlaps the one before, and what is done once that has ended
//   wait                 in clusters, where roles begin before that: what the producers do then
//   for_each             deals work items out to CTAs; by num_items, find_item where it is not the kernel's own
//   find_work            what the producers know of a work item, ...
//   length_of, work_of   ... and the consumers
//   list_of, load_slots, row_of                   their list, its entries, and the row that one names
//   line_at                                       the query and head of each line of Q
//   VALIDITY_LANES, Validity, load_validity, store_validity    what is known of a tile's rows besides their values
//   EXCLUDES, exclude                             whether Q . K gets one more step, and that step
//   Reader, Columns, mask_tile, top_of, count_twice            how softmax applies validity
//   init, write                                   before the first work item, and the results of one
//
// Default is what most kernels have.
struct Default {
    static constexpr bool CLUSTER = false, POLICY = false, OVERLAPS = false;
    static constexpr Skips SKIPS = Skips::NONE;

    template <typename Params>
    static __device__ __forceinline__ void start(const Params&) {}
    template <typename K, typename Params>
    static __device__ __forceinline__ Work find_work(const Params& p, int index, int head_tiles) {
        return K::work_of(p, index, head_tiles, K::length_of(p, index, head_tiles));
    }
    template <typename Params>
    static __device__ __forceinline__ void wait(const Params&, Work&) {}
    // The list entries of a producer thread's rows of one tile; -1 where there is none.
    template <typename K, typename Params>
    static __device__ __forceinline__ void load_slots(const Params& p, const Work& w, const Copier& c, int tile,
                                                      int32_t (&slots)[4]) {
        const int32_t* list = K::list_of(p, w);
        const int first = opaque(tile * TILE_ROWS + c.row);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int entry = first + 16 * i;
            slots[i] = entry < w.length ? list[entry] : -1;
        }
    }
    // Where the row stands that an entry names.
    template <typename Params>
    static __device__ __forceinline__ const uint8_t* row_of(const Params& p, int32_t entry) {
        return p.main.cache + entry * p.main.row_stride;
    }
    template <typename K, typename Params, typename Act>
    static __device__ __forceinline__ void for_each(const Params& p, int head_tiles, Act act) {
        auto find = [&](int item) { return K::find_item(p, item, head_tiles); };
        auto total = [&] { return K::num_items(p, opaque(head_tiles)); };
        for_each_item(total, blockIdx.x, read_num_ctas, find, act);
    }
};

// What the kernels of single queries share.
struct SingleQueries : Default {
    using Params = AttentionParams;
    static constexpr int EXTRA_BYTES = 0, KEPT = 6;
    static constexpr bool EXCLUDES = false;
    static constexpr Skips SKIPS = Skips::MARKED;

    // Whether rows are mostly read once: by decode with no more list entries than the cache has rows.
    static __device__ __forceinline__ bool read_once(const Params& p) {
        return p.flags & DECODE && int64_t(p.num_queries) * p.main.topk <= p.main.num_slots;
    }
    // The query of work item `item`. Mostly a branch saves the division.
    static __device__ __forceinline__ Query query_of_item(const Params& p, uint32_t item, uint32_t head_tiles) {
        return query_by_branch(p, head_tiles == 1 ? item : item / head_tiles);
    }
    static __device__ __forceinline__ const int32_t* list_of(const Params& p, const Work& w) {
        return p.main.indices + w.query.b * p.main.index_stride_b + w.query.s * p.main.index_stride_s + w.first;
    }
    static __device__ __forceinline__ Line line_at(const Params& p, const Work& w, int head) {
        return {w.query, head};
    }

    static constexpr int VALIDITY_LANES = 1;  // of each eight producer threads, those that bring validity
    struct Validity {};
    static __device__ __forceinline__ Validity load_validity(const Params&, const Work&, const Copier&, int) {
        return {};
    }
    static __device__ __forceinline__ void store_validity(const Params&, const Work&, const Copier& c, int, int tile,
                                                          const uint8_t* const (&rows)[4], Validity) {
#pragma unroll
        for (int i = 0; i < 4; ++i) small<SingleQueries>().valid[tile][16 * i + c.row] = rows[i] != nullptr;
    }
    static __device__ __forceinline__ void exclude(int, float (&)[32]) {}

    struct Reader {
        static __device__ __forceinline__ Reader here(const Params&, int, int) { return {}; }
    };
    // The validity bytes of a thread's columns.
    struct Columns {
        const uint8_t* valid;
        bool whole;  // all are valid, in the whole warp

        __device__ __forceinline__ Columns(const Reader&, int tile, int t)
            : valid(small<SingleQueries>().valid[tile] + 2 * t) {
            uint32_t all = 0x0101;
#pragma unroll
            for (int n = 0; n < 8; ++n) all &= *reinterpret_cast<const uint16_t*>(valid + 8 * n);
            whole = __all_sync(~0u, all == 0x0101);
        }
    };
    // Takes out invalid rows. Returns the scale that is still to be multiplied by.
    static __device__ __forceinline__ float mask_tile(const Params& p, const Columns& columns, float (&s)[32]) {
        float scale = 1.0f;
        if (!columns.whole || p.scale_log2 < 0.0f) {
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const uint32_t two = *reinterpret_cast<const uint16_t*>(columns.valid + 8 * n);
#pragma unroll
                for (int i = 0; i < 4; ++i) s[4 * n + i] = two >> (i % 2 * 8) & 1 ? s[4 * n + i] * p.scale_log2 : -INF;
            }
        } else {
            scale = p.scale_log2;
        }
        return scale;
    }
    static __device__ __forceinline__ float top_of(float top, float scale) { return top * scale; }
    static __device__ __forceinline__ void count_twice(const Columns&, int, float (&)[32]) {}

    static __device__ __forceinline__ void init(const Params&) {}
};

// --- producer -------------------------------------------------------------------------------------------------

// Start the copies of column blocks BEGIN to END - 1 of this thread's rows FIRST to LAST - 1, of four, to a tile or Q at
// `place` of shared memory. Null rows become zeros.
template <typename K, int BEGIN, int END, int FIRST = 0, int LAST = 4>
__device__ __forceinline__ void copy_blocks(const Copier& c, int place, const uint8_t* const (&rows)[4]) {
#pragma unroll
    for (int i = FIRST; i < LAST; ++i) {
#pragma unroll
        for (int b = BEGIN; b < END; ++b) {
            const uint32_t to = c.at + place + b * BLOCK_BYTES + i * 2048;
            if constexpr (K::POLICY) {
                cp_async_16(to, rows[i] + b * 128, rows[i] != nullptr, c.policy);
            } else {
                cp_async_16(to, rows[i] + b * 128, rows[i] != nullptr);
            }
        }
    }
}

// Whether a list entry names a row.
__device__ __forceinline__ bool is_valid(const AttentionParams& p, int32_t slot) {
    return uint32_t(slot) < uint32_t(min(p.main.num_slots, int64_t(0x7fffffff)));
}

// A number of each producer warp.
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

    // Before Q is copied, what is needed first is asked for; behind that it is there.
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

// ... or those that are marked as having a valid entry, MARKED tiles at a time.
constexpr int MARKED = 32;
template <typename K>
struct Tiles<K, Skips::MARKED> {
    int first;      // of those at a time
    uint32_t left;  // a bit for each that has not been taken

    // A producer warp loads the entries of every fourth of the tiles, ...
    struct Entries {
        int32_t slots[MARKED / 4][2];
    };
    __device__ __forceinline__ Entries load(const typename K::Params& p, const Work& w) const {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, entry = (first + warp) * TILE_ROWS + lane;
        const int32_t* list = K::list_of(p, w) + entry;
        Entries entries;
#pragma unroll
        for (int i = 0; i < MARKED / 4; ++i) {
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
        for (int i = 0; i < MARKED / 4; ++i) {
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
        if (left == 0 && w.length > MARKED * TILE_ROWS) left = 1;  // there may be some behind these
        if (left == 0) w.length = 0;
        const bool any = left != 0;
        K::template load_slots<K>(p, w, c, take(w), even);
        K::template load_slots<K>(p, w, c, take(w), odd);
        return any;
    }
    // Goes on to tiles behind until one is marked. Returns whether one is.
    __device__ __forceinline__ bool go_on(const typename K::Params& p, const Work& w) {
#pragma unroll 1
        while (left == 0 && (first + MARKED) * TILE_ROWS < w.length) {
            first += MARKED;
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

// Copies region `REGION` of tile `TILE` once it is released: half of V's columns, and maybe the RoPE columns.
template <typename K, int TILE, int REGION>
__device__ __forceinline__ void copy_region(const typename K::Params& p, const Work& w, const Copier& c, int pair,
                                            const uint8_t* const (&rows)[4], typename K::Validity validity,
                                            Follows follows, uint32_t parity) {
    Small& sm = small<K>();
    mbarrier_wait(shared_address(&sm.empty[TILE][REGION][0]), parity);
    copy_blocks<K, 4 * REGION, 4 * REGION + 4, 0, 2>(c, TILE_AT + TILE * TILE_BYTES, rows);
    mbarrier_wait(shared_address(&sm.empty[TILE][REGION][1]), parity);
    copy_blocks<K, 4 * REGION, 4 * REGION + 4, 2, 4>(c, TILE_AT + TILE * TILE_BYTES, rows);
    if constexpr (has_rope(TILE, REGION)) copy_blocks<K, 8, 9>(c, TILE_AT + TILE * TILE_BYTES, rows);
    if constexpr (has_validity<K>(TILE, REGION)) {
        if (c.lane % 8 < K::VALIDITY_LANES) {
            K::store_validity(p, w, c, 2 * pair + TILE, TILE, rows, validity);
            if (K::SKIPS != Skips::NONE && c.row == 0) sm.follows[TILE] = follows;
            mbarrier_arrive(shared_address(&sm.full[TILE][REGION]));
        }
    }
    mbarrier_arrive_after_copies(shared_address(&sm.full[TILE][REGION]));
}

// This thread's chunk of each of its rows, null where a row is not valid.
template <typename K>
__device__ __forceinline__ void find_rows(const typename K::Params& p, const Copier& c, const int32_t (&slots)[4],
                                          const uint8_t* (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        rows[i] = is_valid(p, slots[i]) ? K::row_of(p, slots[i]) + c.lane % 8 * 16 : nullptr;
    }
}

// The same of the lines of Q from `first` on, null for padding. What a warp multiplies that has nothing else is left as
// it is.
template <typename K>
__device__ __forceinline__ void find_q(const typename K::Params& p, const Work& w, const Copier& c, int first,
                                       const uint8_t* (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < HEADS / 16; ++i) {
        const Line line = K::line_at(p, w, w.head_tile * HEADS + first + 16 * i + c.row);
        const bf16* q = p.q + line.query.b * p.q_b + line.query.s * p.q_s + line.head * p.q_h;
        rows[i] = line.head < p.h_q ? reinterpret_cast<const uint8_t*>(q) + c.lane % 8 * 16 : nullptr;
    }
}

// Tells the consumers what they work on next.
template <typename K>
__device__ __forceinline__ void announce(int work, int length) {
    if (threadIdx.x % 128 != 0) return;
    small<K>().work = work;
    small<K>().length = length;
    mbarrier_arrive(shared_address(&small<K>().q_full));
}

template <typename K>
__device__ __forceinline__ void copy_all(const typename K::Params& p) {
    const Copier c = Copier::here<K>(p, threadIdx.x / 32 - 8);
    Small& sm = small<K>();
    uint32_t parity = 3;  // bit 0 of tiles, bit 1 of Q, in one register; the first wait for each space returns at once
    const int head_tiles = num_head_tiles(p);
    K::template for_each<K>(p, head_tiles, [&](int index) {
        Work w = K::template find_work<K>(p, index, head_tiles);
        const uint8_t* rows[4];
        K::wait(p, w);
        int32_t even[4], odd[4];  // list entries of the next even and odd tile
        Tiles<K> tiles;
        const auto asked = tiles.ask(p, w, c, even, odd);

        if constexpr (!K::CLUSTER) {
            // Q is a tile whose rows are its lines.
            mbarrier_wait(shared_address(&sm.q_empty), parity >> 1);
            parity ^= 2;
            find_q<K>(p, w, c, 0, rows);
            copy_blocks<K, 0, BLOCKS, 0, HEADS / 16>(c, 0, rows);
            mbarrier_arrive_after_copies(shared_address(&sm.q_full));
        }

        bool last = !tiles.begin(p, w, c, asked, even, odd);
        announce<K>(index, w.length);
#pragma unroll 1
        for (int pair = 0; !last; ++pair) {
            // A pair without a valid entry is passed over; the last one is copied all the same and tells that it is none.
            const bool any = tiles.any_valid(p, even, odd);
            last = !tiles.go_on(p, w);
            const Follows follows = !any ? ENDED : last ? LAST : MORE;
            const bool copied = any || last;
            find_rows<K>(p, c, even, rows);
            const typename K::Validity even_validity = K::load_validity(p, w, c, 2 * pair);
            if (copied) copy_region<K, 0, 0>(p, w, c, pair, rows, even_validity, follows, parity & 1);
            K::template load_slots<K>(p, w, c, tiles.take(w), even);
            if (copied) copy_region<K, 0, 1>(p, w, c, pair, rows, even_validity, follows, parity & 1);
            find_rows<K>(p, c, odd, rows);
            const typename K::Validity odd_validity = K::load_validity(p, w, c, 2 * pair + 1);
            if (copied) copy_region<K, 1, 0>(p, w, c, pair, rows, odd_validity, follows, parity & 1);
            K::template load_slots<K>(p, w, c, tiles.take(w), odd);
            if (copied) copy_region<K, 1, 1>(p, w, c, pair, rows, odd_validity, follows, parity & 1);
            if (copied) parity ^= 1;
        }
    });
    if constexpr (!K::CLUSTER) {
        mbarrier_wait(shared_address(&sm.q_empty), parity >> 1);
        announce<K>(-1, 0);
        mbarrier_arrive(shared_address(&sm.q_full));
    }
}

// --- consumers ------------------------------------------------------------------------------------------------

// In clusters: copies Q, each warpgroup half of its lines, or the first one all 16.
template <typename K>
__device__ __forceinline__ void copy_q(const typename K::Params& p, int warpgroup, int warp) {
    constexpr int LINES_OF_16 = HEADS / 16, EACH = LINES_OF_16 > 1 ? LINES_OF_16 / 2 : 1;
    const Copier c = Copier::here<K>(p, warp);
    const int first = warpgroup * EACH;
    const uint8_t* rows[4];
    find_q<K>(p, K::work_of(p, blockIdx.x, num_head_tiles(p), 0), c, 16 * first, rows);
    wait_for_earlier_kernels();
    if (first < LINES_OF_16) copy_blocks<K, 0, BLOCKS, 0, EACH>(c, 2048 * first, rows);
    mbarrier_arrive_after_copies(shared_address(&small<K>().q_full));
}

// The softmax of a thread's two lines (g and g + 8 of its warp's 16). Accumulators and `sum` are relative to `ref`.
// `sum` and `max` cover this thread's columns of this warpgroup's tiles only. No logit up to `least` raises `ref`.
struct Softmax {
    float ref[2] = {-INF, -INF}, sum[2] = {0.0f, 0.0f}, max[2] = {-INF, -INF}, least[2] = {-INF, -INF};
};

// The steps of k whose part of Q a consumer warpgroup keeps in registers, so that Q . K reads only K there, are every
// KEPT_EVERY-th: number KEPT_EVERY - 1, 2 KEPT_EVERY - 1, ...
constexpr int KEPT_EVERY = 4;

template <int N>
__device__ __forceinline__ void keep_q(int warp, int lane, uint32_t (&kept)[N][4]) {
    const int line = 16 * warp + lane % 16;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int step = KEPT_EVERY * n + KEPT_EVERY - 1, chunk = step % 4 * 2 + lane / 16;
        ldmatrix_x4(kept[n], swizzled(shared_address(shared) + Q_AT + step / 4 * BLOCK_BYTES, line, chunk));
    }
}

// Start S = Q . K^T of a whole tile, the regions in the order in which they are copied. If tiles are voted on, the first
// has been waited for.
template <typename K, int N>
__device__ __forceinline__ void start_qk(int tile, uint32_t parity, const uint32_t (&kept)[N][4], float (&s)[32]) {
    const uint64_t q = wgmma_operand(shared_address(shared) + Q_AT, 1024, 16);
    const uint64_t k = wgmma_operand(tile_address(tile), 1024, 16);
    auto multiply = [&](int block, bool first) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint64_t a = wgmma_further(q, block * BLOCK_BYTES + 32 * i);
            const uint64_t b = wgmma_further(k, block * BLOCK_BYTES + 32 * i);
            const int step = 4 * block + i;
            if (first && i == 0) {
                wgmma<ITEMS, Sum::SET, Major::K, Major::K>(s, a, b);
            } else if (step % KEPT_EVERY == KEPT_EVERY - 1 && step / KEPT_EVERY < N) {
                wgmma<ITEMS, Sum::ADD, Major::K>(s, kept[step / KEPT_EVERY], b);
            } else {
                wgmma<ITEMS, Sum::ADD, Major::K, Major::K>(s, a, b);
            }
        }
    };
#pragma unroll
    for (int region = 0; region < 2; ++region) {
        if (K::SKIPS != Skips::VOTED || region > 0)
            mbarrier_wait(shared_address(&small<K>().full[tile][region]), parity);
        fence_proxy_async();
        wgmma_fence();
#pragma unroll
        for (int block = 0; block < 4; ++block) multiply(4 * region + block, region + block == 0);
        if (has_rope(tile, region)) multiply(8, false);
        if (K::EXCLUDES && has_validity<K>(tile, region)) K::exclude(tile, s);
    }
    wgmma_commit();
}

// The reference for this warpgroup's tile of pair `pair`, whose largest logits are `top`; see above. Returns whether it
// rises in one of the warp's lines. Mostly a vote is all that is done.
__device__ __forceinline__ bool choose_reference(Softmax& state, const float (&top)[2], int pair, int pairs,
                                                 float (&ref)[2]) {
    ref[0] = state.ref[0];
    ref[1] = state.ref[1];
    if (!__any_sync(~0u, top[0] > state.least[0] || top[1] > state.least[1])) return false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float highest = quad_max(top[row]);
        const float expected = quad_sum(state.sum[row]) * (float(opaque(pairs)) * reciprocal_approx(float(pair)));
        const float slack = pair == 0 ? REF_BELOW : fmaxf(fminf(log2_approx(PEAK * expected), REF_SLACK), REF_BELOW);
        state.least[row] = ref[row] + slack;
        if (highest > state.least[row]) ref[row] = highest - REF_BELOW;
    }
    return __any_sync(~0u, ref[0] != state.ref[0] || ref[1] != state.ref[1]);
}

// S becomes P relative to `ref`, rounded, as the A operands of four steps of k. `sum` is that of P before rounding.
// Returns whether a reference of the warp rises.
template <typename K>
__device__ __forceinline__ bool softmax_tile(const typename K::Params& p, const typename K::Columns& columns, int pair,
                                             int pairs, float (&s)[32], Softmax& state, float (&ref)[2],
                                             float (&sum)[2], uint32_t (&prob)[4][4]) {
    const float scale = K::mask_tile(p, columns, s);
    float top[2] = {-INF, -INF};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int n = 0; n < 8; ++n) top[row] = fmaxf(top[row], fmaxf(s[4 * n + 2 * row], s[4 * n + 2 * row + 1]));
        top[row] = K::top_of(top[row], scale);
        state.max[row] = fmaxf(state.max[row], top[row]);
    }
    const bool rises = choose_reference(state, top, pair, pairs, ref);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float base = finite_reference(ref[row]);
        sum[row] = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float &x = s[4 * n + 2 * row], &y = s[4 * n + 2 * row + 1];
            x = exp2_approx(x * scale - base);
            y = exp2_approx(y * scale - base);
        }
        K::count_twice(columns, row, s);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const float x = s[4 * n + 2 * row], y = s[4 * n + 2 * row + 1];
            sum[row] += x + y;
            prob[n / 2][n % 2 * 2 + row] = pack_items(x, y);
        }
    }
    return rises;
}

// Publishes P and its reference for the other warpgroup.
template <typename K>
__device__ __forceinline__ void publish_p(int tile, int warp, int lane, const uint32_t (&prob)[4][4],
                                          const float (&ref)[2]) {
    const int g = lane / 4, t = lane % 4, row = 16 * warp + g;
    const uint32_t first = swizzled(p_address(tile), 16 * warp + lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < 4; ++k) stmatrix_x4(first ^ 32 * k, prob[k][0], prob[k][1], prob[k][2], prob[k][3]);
    if (t == 0) {
        small<K>().ref[tile][row] = ref[0];
        small<K>().ref[tile][row + 8] = ref[1];
    }
    fence_proxy_async();
    named_barrier_arrive(P_READY + tile, CONSUMERS);
}

// Waits for the other warpgroup's P and its reference.
template <typename K>
__device__ __forceinline__ void take_p(int tile, int warp, int lane, float (&ref)[2]) {
    named_barrier_sync(P_READY + tile, CONSUMERS);
    const int row = 16 * warp + lane / 4;
    ref[0] = small<K>().ref[tile][row];
    ref[1] = small<K>().ref[tile][row + 8];
}

// Before the product with a P relative to `ref`, which is nowhere below the accumulators' reference: they are brought
// to it, once no product is under way. Rarely called for. Before the first product of a work item they are zero, and
// nothing is waited for.
__device__ __forceinline__ void raise(Softmax& state, const float (&ref)[2], float (&o)[128]) {
    const bool begun = __any_sync(~0u, fmaxf(state.ref[0], state.ref[1]) > -INF);
    if (begun) wgmma_wait<0>();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float by = rescale_factor(state.ref[row], ref[row]);
        state.sum[row] *= by;
        state.ref[row] = ref[row];
        state.least[row] = fmaxf(state.least[row], ref[row]);
        if (!begun) continue;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            o[4 * j + 2 * row] *= by;
            o[4 * j + 2 * row + 1] *= by;
        }
    }
}

// The same for the other warpgroup's P.
__device__ __forceinline__ void follow(Softmax& state, const float (&ref)[2], float (&o)[128]) {
    if (!__all_sync(~0u, ref[0] == state.ref[0] && ref[1] == state.ref[1])) raise(state, ref, o);
}

__device__ __forceinline__ uint64_t v_operand(int tile, int half) {
    return wgmma_operand(tile_address(tile) + 4 * half * BLOCK_BYTES, 1024, BLOCK_BYTES);
}

// Start O += P . V for this warpgroup's half of V's columns, each half of the rows a group of products of its own: with
// its own P, ...
__device__ __forceinline__ void start_pv(int tile, int half, const uint32_t (&prob)[4][4], float (&o)[128]) {
    const uint64_t v = v_operand(tile, half);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<ITEMS, Sum::ADD, Major::MN>(o, prob[k], wgmma_further(v, 2048 * k));
        if (k % 2 == 1) wgmma_commit();
    }
}

// ... with the other warpgroup's.
__device__ __forceinline__ void start_pv(int tile, int half, float (&o)[128]) {
    const uint64_t p = wgmma_operand(p_address(tile), 1024, 16), v = v_operand(tile, half);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<ITEMS, Sum::ADD, Major::K, Major::MN>(o, wgmma_further(p, 32 * k), wgmma_further(v, 2048 * k));
        if (k % 2 == 1) wgmma_commit();
    }
}

// A warp's arrival at an `empty` barrier.
__device__ __forceinline__ void release(uint64_t& barrier, int lane) {
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&barrier), lane);
}

// Releases a region whose product is under way, each half of its rows as soon as it has been multiplied.
__device__ __forceinline__ void release_halves(uint64_t (&empty)[2], int lane) {
    wgmma_wait<1>();
    release(empty[0], lane);
    wgmma_wait<0>();
    release(empty[1], lane);
}

// A line's softmax over the tiles of both warpgroups.
struct LineTotal {
    float ref, sum, max;
};

// That of a thread's i-th line at the end of work item number `turn` (mod 2) of a CTA.
template <typename K>
__device__ __forceinline__ LineTotal line_total(int warp, int lane, int turn, const Softmax& state, int i) {
    const Small& sm = small<K>();
    const int row = 16 * warp + lane / 4 + 8 * i;
    return {state.ref[i], sm.sum[turn][0][row] + sm.sum[turn][1][row],
            fmaxf(sm.max[turn][0][row], sm.max[turn][1][row])};
}

// Writes the output and statistics of one work item: a warpgroup's half of the columns. `total_of(i)` returns the
// LineTotal of a thread's i-th line.
template <typename K, typename Total>
__device__ __forceinline__ void write_lines(const typename K::Params& p, const Work& w, int warpgroup, int warp,
                                            int lane, Total total_of, const float (&o)[128]) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = 16 * warp + g + 8 * i;
        const Line line = K::line_at(p, w, w.head_tile * HEADS + row);
        const LineTotal total = total_of(i);
        const HeadResult result = {total.max, log2_sum_exp(total.ref, total.sum)};
        const bool here = line.head < p.h_q;  // all lanes of the quad agree, and all take part in the shuffles
        const float scale = !here || total.sum == 0.0f ? 0.0f : sink_factor(p, line.head, result.lse) / total.sum;
        bf16* out = out_of(p, line.query, line.head, 256 * warpgroup);
        const bool aligned = p.flags & WIDE_OUT;
#pragma unroll
        for (int j = 0; j < 32; j += 4) {
            uint32_t packed[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float* two = &o[4 * (j + k) + 2 * i];
                packed[k] = pack_items(two[0] * scale, two[1] * scale);
            }
            transpose_quad(packed, t);
            if (here) store_chunk(out + CHUNK * (j + t), {packed[0], packed[1], packed[2], packed[3]}, aligned);
        }
        if (warpgroup == 0 && t == 0 && here) write_statistics(p, line.query, line.head, result);
    }
}

// The end of a work item in a consumer warpgroup.
template <typename K>
__device__ __forceinline__ void finish(const typename K::Params& p, const Work& w, int turn, const Softmax& state,
                                       float (&o)[128]) {
    Small& sm = small<K>();
    const int thread = read_thread_index();  // anew: what was derived from it takes no registers all through the loop
    const int warpgroup = thread / WARPGROUP, warp = thread / 32 % 4, lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(state.sum[i]), max = quad_max(state.max[i]);
        if (t == 0) {
            sm.sum[turn][warpgroup][16 * warp + g + 8 * i] = sum;
            sm.max[turn][warpgroup][16 * warp + g + 8 * i] = max;
        }
    }
    sync_consumers();
    auto total_of = [&](int i) { return line_total<K>(warp, lane, turn, state, i); };
    K::write(p, w, warpgroup, warp, lane, total_of, o);
}

// All pairs of tiles of a work item in warpgroup W.
template <typename K, int W>
__device__ __forceinline__ void multiply_pairs(const typename K::Params& p, const typename K::Reader& reader,
                                               int pairs, int warp, int lane, const uint32_t (&kept)[K::KEPT][4],
                                               uint32_t& parity, Softmax& state, float (&o)[128]) {
    Small& sm = small<K>();
    // By this instruction: with an ordinary load every operand of wgmma took two R2UR in clusters and shares.
    auto what_follows = [&] { return load_shared_4(shared_address(&sm.follows[W])); };
    bool last = pairs == 0;
    for (int pair = 0; !last; ++pair) {
        if constexpr (K::SKIPS == Skips::VOTED) {
            mbarrier_wait(shared_address(&sm.full[W][0]), parity);
            const uint32_t follows = what_follows();
            if (follows == ENDED) break;
            last = follows == LAST;
        }
        float s[32];
        start_qk<K>(W, parity, kept, s);
        parity ^= 1;
        const typename K::Columns columns(reader, W, lane % 4);
        if constexpr (K::SKIPS == Skips::MARKED) last = what_follows() != MORE;
        if constexpr (K::SKIPS == Skips::NONE) last = pair + 1 == pairs;
        uint32_t mine[4][4];
        float my_ref[2], my_sum[2], other_ref[2];
        if constexpr (W == 0) {
            wgmma_wait<0>();
        } else {
            // P_0 is ready by now: its product runs while this warpgroup computes P_1.
            take_p<K>(0, warp, lane, other_ref);
            follow(state, other_ref, o);
            start_pv(0, W, o);
            wgmma_wait<2>();
        }
        if (!K::CLUSTER && last) release(sm.q_empty, lane);
        const bool rises = softmax_tile<K>(p, columns, pair, pairs, s, state, my_ref, my_sum, mine);
        publish_p<K>(W, warp, lane, mine, my_ref);
        if constexpr (W == 1) {
            release_halves(sm.empty[0][1], lane);
        }
        if (rises) raise(state, my_ref, o);
        state.sum[0] += my_sum[0];
        state.sum[1] += my_sum[1];
        start_pv(W, W, mine, o);
        release_halves(sm.empty[W][W], lane);
        if constexpr (W == 0) {
            take_p<K>(1, warp, lane, other_ref);
            follow(state, other_ref, o);
            start_pv(1, W, o);
            release_halves(sm.empty[1][0], lane);
        }
    }
}

// Both consumer warpgroups. Only what they do with tiles differs: instructions that run once a work item are fetched
// from memory, and are the same for both.
template <typename K>
__device__ __forceinline__ void multiply_all(const typename K::Params& p, int warpgroup) {
    Small& sm = small<K>();
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const typename K::Reader reader = K::Reader::here(p, warp, lane);
    uint32_t parity = 0, turn = 0;
    if constexpr (K::CLUSTER) copy_q<K>(p, warpgroup, warp);
#pragma unroll 1
    for (;; turn ^= 1) {
        Softmax state;
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0.0f;
        mbarrier_wait(shared_address(&sm.q_full), turn);
        if (!K::CLUSTER && sm.work < 0) break;
        const Work w = K::work_of(p, sm.work, num_head_tiles(p), sm.length);
        uint32_t kept[K::KEPT][4];
        keep_q(warp, lane, kept);
        if (!K::CLUSTER && w.pairs == 0) release(sm.q_empty, lane);
        if (warpgroup == 0) {
            multiply_pairs<K, 0>(p, reader, w.pairs, warp, lane, kept, parity, state, o);
        } else {
            multiply_pairs<K, 1>(p, reader, w.pairs, warp, lane, kept, parity, state, o);
        }
        finish<K>(p, w, turn, state, o);
        if constexpr (K::CLUSTER) break;
    }
}

// --- the kernel -----------------------------------------------------------------------------------------------

template <typename K>
__device__ __forceinline__ void run(const typename K::Params& p) {
    Small& sm = small<K>();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int region = 0; region < 2; ++region) {
                const bool validity = has_validity<K>(tile, region);
                mbarrier_init(shared_address(&sm.full[tile][region]), 128 + (validity ? 16 * K::VALIDITY_LANES : 0));
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    mbarrier_init(shared_address(&sm.empty[tile][region][half]), 4 * WARP_ARRIVALS);
            }
        }
        mbarrier_init(shared_address(&sm.q_full), (K::CLUSTER ? CONSUMERS : WARPGROUP) + 1);
        mbarrier_init(shared_address(&sm.q_empty), 8 * WARP_ARRIVALS);
        mbarrier_init_fence();
    }
    K::init(p);
    __syncthreads();
    if constexpr (K::OVERLAPS && !K::CLUSTER) {
        wait_for_earlier_kernels();
        K::start(p);
        let_next_kernel_start();
    }
    const int warpgroup = uniform(threadIdx.x / WARPGROUP);
    if (warpgroup == 2) {
        decrease_registers_to<40>();
        copy_all<K>(p);
        if constexpr (K::CLUSTER) cluster_sync_with_one_fence(false);  // cluster barriers count every thread
    } else {
        increase_registers_to<232>();
        multiply_all<K>(p, warpgroup);
    }
}
