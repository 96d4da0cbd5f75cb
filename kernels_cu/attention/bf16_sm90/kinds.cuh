// Part of bf16_sm90: how its kernels differ. Each kernel passes a struct `K` to the pipeline, with these members:
//
//   Params, EXTRA_BYTES  the kernel's parameter struct; shared memory that it needs in addition
//   KEPT_Q_STEPS         steps of k whose part of Q a consumer warpgroup keeps in registers
//   CLUSTER              whether CTAs form clusters. A CTA then has one work item
//   POLICY, read_once    whether copies have an L2 policy; and whether rows are read once, so that they leave L2 first
//   SKIPS                how tiles without a valid entry are skipped
//   load_last_entry, shorten_list   VOTED: loads a list's last entry; if that is invalid, cuts the list at its end
//   OVERLAPS, start      whether the launch overlaps the one before; what to do once that one has ended
//   ROLES_START_EARLY, finds_work_in_memory   whether producers and consumers start before that one has ended, unless
//                        the first work item depends on memory
//   wait                 then, and in clusters: how the producers wait for the launch before
//   for_each             deals work items out to CTAs. The default needs num_items and find_item
//   find_work            makes the producers' Work of a work item
//   length_of, work_of   make the consumers' Work
//   list_of, load_slots, row_of    a work item's list; its entries; the row that an entry names
//   line_at              the query and head of a line of Q
//   VALIDITY_LANES, Validity, load_validity, store_validity   what consumers must know of a tile's rows beside values
//   EXCLUDES, exclude    whether Q . K has an additional step of k, and that step
//   Reader, Columns, mask_tile, top_of, count_twice           how the softmax applies validity
//   init, write          what to do before the first work item; the epilogue of a work item
#pragma once
#include "attention/bf16_sm90/plan.cuh"
#include "ptx/cache_policy.cuh"

// A producer thread. It copies 16-byte chunk `lane % 8` of rows row + 16 i, i = 0 .. 3, of every column block.
struct Copier {
    int warp, lane, row;
    uint32_t at;      // address in shared memory of its chunk of line `row` of Q
    uint64_t policy;  // L2 policy of copies, if K::POLICY

    // `warp`: the index of the warp in its warpgroup.
    template <typename K>
    static __device__ __forceinline__ Copier here(const typename K::Params& p, int warp) {
        Copier c;
        if constexpr (K::POLICY) c.policy = K::read_once(p) ? evict_first() : evict_normal();
        c.warp = warp;
        c.lane = threadIdx.x % 32;
        c.row = 4 * c.warp + c.lane / 8;
        // The swizzle repeats after 16 rows. `opaque` works around wrong addresses: where the compiler added this to
        // uniform registers, copies went to wrong places (docs/kernels/bf16_cluster_sm90.md).
        c.at = opaque(swizzled(shared_address(shared) + Q_AT, c.row, c.lane % 8));
        return c;
    }
};

// Defaults of most kernels.
struct Default {
    static constexpr bool CLUSTER = false, POLICY = false, OVERLAPS = false, ROLES_START_EARLY = false;
    static constexpr Skips SKIPS = Skips::NONE;

    template <typename Params>
    static __device__ __forceinline__ void start(const Params&) {}
    template <typename Params>
    static __device__ __forceinline__ bool finds_work_in_memory(const Params&) {
        return true;
    }
    template <typename K, typename Params>
    static __device__ __forceinline__ Work find_work(const Params& p, int index, int head_tiles) {
        return K::work_of(p, index, head_tiles, K::length_of(p, index, head_tiles));
    }
    template <typename Params>
    static __device__ __forceinline__ void wait(const Params&, Work&) {}
    // Loads the list entries of a producer thread's rows of one tile; -1 where there is none.
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
    // The address of the row that an entry names.
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

// What the kernels have in common whose work item belongs to one query.
struct SingleQueries : Default {
    using Params = AttentionParams;
    static constexpr int EXTRA_BYTES = 0, KEPT_Q_STEPS = 6;
    static constexpr bool EXCLUDES = false;
    static constexpr Skips SKIPS = Skips::MARKED;

    // Whether most rows are read once: in decode, if there are no more list entries than the cache has rows.
    static __device__ __forceinline__ bool read_once(const Params& p) {
        return p.flags & DECODE && int64_t(p.num_queries) * p.main.topk <= p.main.num_slots;
    }
    // The query of work item `item`. The branch mostly saves a division.
    static __device__ __forceinline__ Query query_of_item(const Params& p, uint32_t item, uint32_t head_tiles) {
        return query_by_branch(p, head_tiles == 1 ? item : item / head_tiles);
    }
    static __device__ __forceinline__ const int32_t* list_of(const Params& p, const Work& w) {
        return p.main.indices + w.query.b * p.main.index_stride_b + w.query.s * p.main.index_stride_s + w.first;
    }
    static __device__ __forceinline__ Line line_at(const Params& p, const Work& w, int head) {
        return {w.query, head};
    }

    static constexpr int VALIDITY_LANES = 1;  // of each eight producer threads, those that store validity
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
    // The validity bytes of a thread's columns of S.
    struct Columns {
        const uint8_t* valid;
        bool whole;  // in the whole warp all columns are valid

        __device__ __forceinline__ Columns(const Reader&, int tile, int t)
            : valid(small<SingleQueries>().valid[tile] + 2 * t) {
            uint32_t all = 0x0101;
#pragma unroll
            for (int n = 0; n < 8; ++n) all &= *reinterpret_cast<const uint16_t*>(valid + 8 * n);
            whole = __all_sync(~0u, all == 0x0101);
        }
    };
    // Masks invalid rows. Returns the scale that S is still to be multiplied by.
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
