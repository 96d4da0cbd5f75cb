// Dense attention of bf16 rows on Hopper, for few rows. A cluster works on HEADS lines of a request. (HEADS is 64, or
// 16 or 32 with padding to 64: that takes as long to multiply, but less to copy and to merge.) Each CTA of the cluster
// has neighbouring pairs of tiles; the CTAs merge their partial results (merge.cuh). Rows: dense_rows.cuh. Pipeline
// and shared memory: bf16_sm90.cuh.
//
// The launch overlaps the launch before it. Until that has ended, the number of rows is not known.
//
// What is exact: rows and Q are multiplied as they are. What is rounded: P, to the rows' 16-bit type; results; partial
// results, to float16 times a power of two for each line. Products and sums are float32 (bf16_sm90.cuh).
//
// grid: x = item * CTAs of the cluster + rank.
#include "attention/dense_rows.cuh"

struct DenseCluster : RequestRows {
    static constexpr bool CLUSTER = true;

    template <typename, typename P, typename Act>
    static __device__ __forceinline__ void for_each(const P&, int, Act act) {
        act(int(blockIdx.x));
    }
    static __device__ __forceinline__ Work work_of(const Params&, int index, int head_tiles, int length) {
        const int item = cluster_index(), request = head_tiles == 1 ? item : item / head_tiles;
        return split_of(request, item - request * head_tiles, index, {}, 0, length);
    }
    template <typename>
    static __device__ __forceinline__ Work find_work(const Params& p, int index, int head_tiles) {
        return work_of(p, index, head_tiles, 0);
    }
    static __device__ __forceinline__ void wait(const Params& p, Work& w) {
        wait_for_earlier_kernels();
        let_next_kernel_start();
        const RowsOf rows = rows_of(p, w.query.b);
        const int pairs = num_pairs(rows.count()), size = cluster_size(), rank = cluster_rank();
        const int begin = pairs * rank / size * 2 * TILE_ROWS, end = pairs * (rank + 1) / size * 2 * TILE_ROWS;
        w = split_of(w.query.b, w.head_tile, w.number, rows, begin, min(end, rows.count()) - begin);
    }

    template <typename Total>
    static __device__ __forceinline__ void write(const Params& p, const Work& w, int warpgroup, int warp, int lane,
                                                 Total total_of, const float (&o)[128]) {
        merge_cluster<DenseCluster>(p, w, cluster_index(), warpgroup, warp, lane, total_of, o);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) dense_cluster_sm90(const __grid_constant__ DenseParams p) {
    run<DenseCluster>(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = DENSE_SHARED_BYTES;
