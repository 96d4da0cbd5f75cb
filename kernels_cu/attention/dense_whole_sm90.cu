// Dense attention of bf16 rows on Hopper, for short requests. A work item is HEADS lines of a request and all its
// rows. (HEADS is 64; or 16 or 32 with padding to 64, so that few requests of many lines have more CTAs, which write
// their results sooner.) Rows: dense_rows.cuh. Pipeline and shared memory: bf16_sm90.cuh.
//
// What is exact: rows and Q are multiplied as they are. What is rounded: P, to the rows' 16-bit type; results. Products
// and sums are float32 (bf16_sm90.cuh).
//
// grid: x persistent CTAs over requests x tiles of their lines.
#include "attention/dense_rows.cuh"

struct DenseWhole : RequestRows {
    static constexpr bool ROLES_START_EARLY = true;

    static __device__ __forceinline__ bool finds_work_in_memory(const Params&) { return false; }
    static __device__ __forceinline__ int num_items(const Params& p, int head_tiles) {
        return p.num_queries * head_tiles;
    }
    static __device__ __forceinline__ int find_item(const Params&, int item, int) { return item; }
    static __device__ __forceinline__ Work work_of(const Params&, int item, int head_tiles, int length) {
        const int request = head_tiles == 1 ? item : item / head_tiles;
        return split_of(request, item - request * head_tiles, item, {}, 0, length);
    }
    // The number of rows is not known before the launch before has ended.
    template <typename>
    static __device__ __forceinline__ Work find_work(const Params& p, int item, int head_tiles) {
        return work_of(p, item, head_tiles, 0);
    }
    static __device__ __forceinline__ void wait(const Params& p, Work& w) {
        wait_for_earlier_kernels();  // after the first item these two do nothing
        let_next_kernel_start();
        const RowsOf rows = rows_of(p, w.query.b);
        w = split_of(w.query.b, w.head_tile, w.number, rows, 0, rows.count());
    }

    template <typename Total>
    static __device__ __forceinline__ void write(const Params& p, const Work& w, int warpgroup, int warp, int lane,
                                                 Total total_of, const float (&o)[128]) {
        write_lines<DenseWhole>(p, w, warpgroup, warp, lane, total_of, o);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) dense_whole_sm90(const __grid_constant__ DenseParams p) {
    run<DenseWhole>(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = DENSE_SHARED_BYTES;
