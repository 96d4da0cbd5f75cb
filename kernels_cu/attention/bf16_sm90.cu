// Sparse attention of flat bf16 rows on Hopper: a work item is 64 heads of a query. Pipeline and shared memory:
// bf16_sm90.cuh.
//
// What is exact: rows and Q are multiplied as they are. What is rounded: P, to bf16; results. Products
// and sums are float32 (bf16_sm90.cuh).
//
// grid: x persistent CTAs over queries x head tiles.
#include "attention/bf16_sm90.cuh"

struct Plain : SingleQueries {
    static constexpr bool POLICY = true, OVERLAPS = true, ROLES_START_EARLY = true;

    static __device__ __forceinline__ bool finds_work_in_memory(const Params& p) {
        return p.order != nullptr || has_lengths(p) || p.flags & SOME_DONE;
    }
    // Called for each work item; after the first these do nothing.
    static __device__ __forceinline__ void wait(const Params&, Work&) {
        if constexpr (!ROLES_START_EARLY) return;
        wait_for_earlier_kernels();
        let_next_kernel_start();
    }
    static __device__ __forceinline__ int num_items(const Params& p, int head_tiles) {
        return p.num_queries * head_tiles;
    }
    static __device__ __forceinline__ int find_item(const Params& p, int item, int head_tiles) {
        return find_head_tile(p, item, head_tiles);
    }
    static __device__ __forceinline__ int length_of(const Params& p, int index, int head_tiles) {
        return list_length(p.main, query_of_item(p, index, head_tiles).b);
    }
    static __device__ __forceinline__ Work work_of(const Params& p, int index, int head_tiles, int length) {
        const Query query = query_of_item(p, index, head_tiles);
        return {query, index - query.index * head_tiles, length, num_pairs(length), index, 0};
    }

    template <typename Total>
    static __device__ __forceinline__ void write(const Params& p, const Work& w, int warpgroup, int warp, int lane,
                                                 Total total_of, const float (&o)[128]) {
        write_lines<Plain>(p, w, warpgroup, warp, lane, total_of, o);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) bf16_sm90(const __grid_constant__ AttentionParams p) {
    run<Plain>(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES<Plain>;
