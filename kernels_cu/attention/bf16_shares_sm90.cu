// Sparse attention of flat bf16 rows on Hopper, 64 heads of a query at a time. All rows of the call are divided evenly
// over the CTAs, or each work item into equal splits (division/share.cuh). It serves batches that do not fill whole
// waves. Pipeline and shared memory: bf16_sm90.cuh.
//
//   a CTA's share, worked on backwards     | end of item 7 | item 8 | begin of item 9 |
//                                             3. merge        2.      1. partial result for the CTA with the
//                                                                        end of item 9
//
// What is exact: rows and Q are multiplied as they are. What is rounded: P, to bf16; results; partial
// results, to float16 times a power of two for each line. Products and sums are float32 (bf16_sm90.cuh).
//
// grid: x CTAs.
#include "attention/bf16_sm90.cuh"
#include "attention/bf16_sm90/partials.cuh"
#include "attention/division/find_share.cuh"
#include "attention/division/share_partials.cuh"

struct State {
    Share<THREADS> mine;
    float largest[2][LINES];  // for write_partial
    int share, partials;      // this CTA's share, and the number of partial results that it merges
};

struct InShares : SingleQueries {
    static constexpr bool POLICY = true, OVERLAPS = true;

    static __device__ __forceinline__ State& state() {
        return *reinterpret_cast<State*>(shared + SHARED_BYTES<InShares>);
    }

    static __device__ __forceinline__ void init(const Params& p) {
        const int share = share_side_by_side(p);
        if (threadIdx.x == 0) state().share = share;
        find_share_early(p, share, state().mine);
    }
    static __device__ __forceinline__ void start(const Params& p) { find_share(p, state().share, state().mine); }

    // --- splits, each named by its item ----------------------------------------------------------------------

    template <typename, typename Params, typename Act>
    static __device__ __forceinline__ void for_each(const Params&, int, Act act) {
        const Boundary end = state().mine.end;
#pragma unroll 1
        for (int item = end.item - (end.pair == 0); item >= state().mine.begin.item; --item) act(item);
    }
    static __device__ __forceinline__ bool begins_item(int item) { return state().mine.begins(item); }
    static __device__ __forceinline__ bool ends_item(int item) { return state().mine.ends(item); }
    static __device__ __forceinline__ int first_entry(int item) {
        return begins_item(item) ? 0 : state().mine.begin.pair * 2 * TILE_ROWS;
    }
    static __device__ __forceinline__ int length_of(const Params& p, int item, int) {
        const int length = list_length(p.main, query_of(p, ::query_of_item(p, item)).b);
        return (ends_item(item) ? length : state().mine.end.pair * 2 * TILE_ROWS) - first_entry(item);
    }
    static __device__ __forceinline__ Work work_of(const Params& p, int item, int, int length) {
        return {query_of(p, ::query_of_item(p, item)),
                head_tile_of_item(p, item),
                length,
                num_pairs(length),
                item,
                first_entry(item)};
    }

    // --- results ----------------------------------------------------------------------------------------------

    // Adds the partial results that earlier CTAs have of the item.
    static __device__ __forceinline__ void merge(const Params& p, const Work& w, int warpgroup, int warp, int lane,
                                                 LineTotal (&total)[2], float (&o)[128]) {
        if (threadIdx.x < 32) {
            const int count = wait_for_partials(p, state().share, lane);
            if (lane == 0) state().partials = count;
        }
        sync_consumers();
        if (warp >= num_used_warps(p, w)) return;  // all its lines are padding
        const PartialResults<8> partials = {p.cluster_parts, 0};
        const int line = 16 * warp + lane / 4;
#pragma unroll 1
        for (int left = state().partials; left > 0; --left) {
            const int other = state().share - left;
            float4 chunks[2][8];  // of both lines; all are loaded before the first is used
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int n = 0; n < 8; ++n)
                    chunks[i][n] = partials.chunk_of(other, chunk_of(warpgroup, warp, lane, i, n));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float4 theirs = partials.statistics_of(other, line + 8 * i);
                const float ref = fmaxf(total[i].ref, theirs.x), by = rescale_factor(total[i].ref, ref);
                const float others = rescale_factor(theirs.x, ref);
                total[i] = {ref, total[i].sum * by + theirs.y * others, fmaxf(total[i].max, theirs.z)};
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    float v[8] = {};
                    add_chunk(v, others * theirs.w, chunks[i][n]);
#pragma unroll
                    for (int m = 0; m < 8; ++m) {
                        float& mine = o[16 * n + m / 2 * 4 + 2 * i + m % 2];
                        mine = mine * by + v[m];
                    }
                }
            }
        }
    }

    template <typename Total>
    static __device__ __forceinline__ void write(const Params& p, const Work& of, int warpgroup, int warp, int lane,
                                                 Total total_of, float (&o)[128]) {
        // Computed anew here, so that it occupies no registers in the main loop.
        const Work w = work_of(p, opaque(of.number), num_head_tiles(p), 0);
        warp = opaque(warp);
        if (!ends_item(w.number)) {
            const PartialResults<8> partials = {p.cluster_parts, state().share};
            write_partial(partials, state().largest, num_used_warps(p, w), warpgroup, warp, lane, total_of, o);
            sync_consumers();
            if (threadIdx.x == 0) announce_partial(p, state().share, begins_item(w.number));
            return;
        }
        LineTotal total[2] = {total_of(0), total_of(1)};
        if (!begins_item(w.number)) merge(p, w, warpgroup, warp, lane, total, o);
        write_lines<InShares>(p, w, warpgroup, warp, lane, [&](int i) { return total[i]; }, o);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) bf16_shares_sm90(const __grid_constant__ AttentionParams p) {
    run<InShares>(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES<InShares> + int(sizeof(State));
