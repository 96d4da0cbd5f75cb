// Sparse attention of flat bf16 rows on Hopper, for few work items. A cluster works on HEADS heads of a query. (HEADS
// is 64, or 16 or 32 with padding to 64: that takes as long to multiply, but less to copy and to merge.) Each CTA of
// the cluster has neighbouring pairs of tiles; the CTAs merge their partial results (merge.cuh). Pipeline and shared
// memory: bf16_sm90.cuh.
//
// Lists may end with -1. A CTA first finds the last valid entry: it loads the list's last entry, and searches
// backwards only if that one is invalid. The entries up to there are divided over the cluster. Among them, a pair of
// tiles without a valid entry is skipped. (To skip single tiles as well would cost full lists 1 to 2 %.)
//
// The launch overlaps the launch before it. Until that has ended, the producers find their work, and the consumers the
// addresses of Q.
//
// What is exact: rows and Q are multiplied as they are. What is rounded: P, to bf16; results; partial
// results, to float16 times a power of two for each line. Products and sums are float32 (bf16_sm90.cuh).
//
// grid: x = (query * head tiles + head tile) * CTAs of the cluster + rank.
#include "attention/bf16_sm90.cuh"
#include "attention/bf16_sm90/partials.cuh"

struct Cluster : SingleQueries {
    static constexpr bool CLUSTER = true, POLICY = true, OVERLAPS = true;
    static constexpr Skips SKIPS = Skips::VOTED;

    template <typename, typename Params, typename Act>
    static __device__ __forceinline__ void for_each(const Params&, int, Act act) {
        act(int(blockIdx.x));
    }
    // The first entry of the part that CTA `rank` of the cluster has of a list. The quotient is exact up to 2^16
    // pairs.
    static __device__ __forceinline__ int first_entry(int length, int rank) {
        const int pair = int(__fdividef(float(num_pairs(length) * rank) + 0.5f, float(cluster_size())));
        return min(pair * 2 * TILE_ROWS, length);
    }
    // Sets this CTA's part of a list of `length` entries.
    static __device__ __forceinline__ void take_part(Work& w, int length) {
        const int rank = cluster_rank();
        w.first = first_entry(length, rank);
        w.length = first_entry(length, rank + 1) - w.first;
        w.pairs = num_pairs(w.length);
    }
    static __device__ __forceinline__ Work work_of(const Params& p, int index, int head_tiles, int length) {
        const int item = cluster_index();
        const Query query = query_of_item(p, item, head_tiles);
        return {query, item - query.index * head_tiles, length, num_pairs(length), index, 0};
    }
    template <typename>
    static __device__ __forceinline__ Work find_work(const Params& p, int index, int head_tiles) {
        Work w = work_of(p, index, head_tiles, 0);
        w.list = ::list_of(p.main, w.query);
        w.listed = p.main.topk;
        take_part(w, w.listed);
        return w;
    }
    // What comes before does not read memory that an earlier launch writes.
    static __device__ __forceinline__ void wait(const Params& p, Work& w) {
        wait_for_earlier_kernels();
        let_next_kernel_start();
        if (p.main.lengths == nullptr) return;
        w.listed = list_length(p.main, w.query.b);
        take_part(w, w.listed);
    }
    static __device__ __forceinline__ const int32_t* list_of(const Params&, const Work& w) { return w.list + w.first; }

    static __device__ __forceinline__ int32_t load_last_entry(const Params&, const Work& w) {
        return w.listed > 0 ? w.list[w.listed - 1] : -1;
    }
    static __device__ __forceinline__ bool shorten_list(const Params& p, Work& w, int32_t last) {
        if (is_valid(p, last)) return false;
        take_part(w, find_end<Cluster>(p, w.list, w.listed));
        return true;
    }

    template <typename Total>
    static __device__ __forceinline__ void write(const Params& p, const Work& w, int warpgroup, int warp, int lane,
                                                 Total total_of, const float (&o)[128]) {
        merge_cluster<Cluster>(p, w, w.query.index * num_head_tiles(p) + w.head_tile, warpgroup, warp, lane, total_of,
                               o);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) bf16_cluster_sm90(const __grid_constant__ AttentionParams p) {
    run<Cluster>(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES<Cluster>;
