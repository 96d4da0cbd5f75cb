// Dense attention of bf16 rows on Hopper. A work item is 64 lines of a request: its query tokens times its heads,
// which share the request's rows. All rows of the call are divided evenly over the CTAs, or each work item into equal
// splits (division/request_shares.cuh); dense_combine.cu merges the partial results. Pipeline and shared memory:
// bf16_sm90.cuh.
//
// What is exact: rows and Q are multiplied as they are. What is rounded: P, to the rows' 16-bit type; results; partial
// results, to float16 times a power of two for each line. Products and sums are float32 (bf16_sm90.cuh).
//
// grid: x CTAs.
#include "attention/dense_rows.cuh"
#include "attention/division/request_shares.cuh"

struct State {
    Share<THREADS> mine;
    float largest[2][LINES];  // for write_partial
    int share;                // number of this CTA's share
};

struct Dense : RequestRows {
    static __device__ __forceinline__ State& state() { return *reinterpret_cast<State*>(shared + DENSE_SHARED_BYTES); }

    // --- splits, numbered by their items ----------------------------------------------------------------------

    static __device__ __forceinline__ void init(const Params& p) {
        if (threadIdx.x == 0) state().share = share_side_by_side(p);
    }
    static __device__ __forceinline__ void start(const Params& p) {
        auto pairs_at = [&](int request) { return num_pairs(rows_of(p, request).count()); };
        find_request_share(p, state().share, state().mine, pairs_at);
    }
    template <typename, typename P, typename Act>
    static __device__ __forceinline__ void for_each(const P&, int, Act act) {
        const int last = state().mine.last_item();
#pragma unroll 1
        for (int item = state().mine.begin.item; item <= last; ++item) act(item);
    }
    // The first row of this CTA's split, counted from rows_of(..).begin.
    static __device__ __forceinline__ int first_row(int item) {
        return state().mine.begins(item) ? 0 : state().mine.begin.pair * 2 * TILE_ROWS;
    }
    static __device__ __forceinline__ int length_of(const Params& p, int item, int) {
        const int all = rows_of(p, ::query_of_item(p, item)).count();
        const int end = state().mine.ends(item) ? all : min(state().mine.end.pair * 2 * TILE_ROWS, all);
        return max(0, end - first_row(item));
    }
    static __device__ __forceinline__ Work work_of(const Params& p, int item, int, int length) {
        const int request = ::query_of_item(p, item);
        return split_of(request, head_tile_of_item(p, item), item, rows_of(p, request), first_row(item), length);
    }

    // --- results ----------------------------------------------------------------------------------------------

    template <typename Total>
    static __device__ __forceinline__ void write(const Params& p, const Work& of, int warpgroup, int warp, int lane,
                                                 Total total_of, const float (&o)[128]) {
        // Computed anew here, so that it occupies no registers in the main loop.
        const Work w = work_of(p, opaque(of.number), num_head_tiles(p), 0);
        warp = opaque(warp);
        const Share<THREADS>& mine = state().mine;
        const bool ends = mine.ends(w.number);
        if (ends && mine.begins(w.number)) {
            write_lines<Dense>(p, w, warpgroup, warp, lane, total_of, o);
            return;
        }
        const PartialResults<8> partial = partial_of(p, state().share, !ends);
        write_partial(partial, state().largest, num_used_warps(p, w), warpgroup, warp, lane, total_of, o);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) dense_sm90(const __grid_constant__ DenseParams p) {
    run<Dense>(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = DENSE_SHARED_BYTES + int(sizeof(State));
