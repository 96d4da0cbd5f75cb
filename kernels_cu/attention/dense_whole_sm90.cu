// Dense attention of bf16 rows on Hopper, for short requests. A work item is HEADS lines of a request and all its
// rows. (HEADS is 64; or 16 or 32 with padding to 64, so that few requests of many lines have more CTAs, which write
// their results sooner.) Rows: dense_rows.cuh. Pipeline and shared memory: bf16_sm90.cuh.
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
#if SORT_SECOND_ITEMS
    // CTAs take items in turn. If no CTA has more than two, the second ones are found by their lengths: the fewer pairs
    // of tiles a CTA's first item has, the more has its second one. A consumer warp finds it while the first rows come.
    static __device__ __forceinline__ int& second() { return *reinterpret_cast<int*>(shared + DENSE_SHARED_BYTES); }
    static __device__ __forceinline__ bool finds_second(int items, int ctas) {
        return items > ctas && items <= 2 * ctas && ctas <= 32 * SECOND_ITEMS;
    }
    template <typename, typename P, typename Act>
    static __device__ __forceinline__ void for_each(const P& p, int head_tiles, Act act) {
        int item = blockIdx.x;
#pragma unroll 1
        for (int n = 1; item >= 0; ++n) {
            act(item);
            const int items = num_items(p, opaque(head_tiles)), ctas = read_num_ctas();
            item = n * ctas + (n % 2 == 0 ? int(blockIdx.x) : ctas - 1 - int(blockIdx.x));
            if (item >= items) item = -1;
            if (!finds_second(items, ctas)) continue;
            if (n > 1) break;
            named_barrier_sync(SECOND_FOUND, WARPGROUP + 32);
            item = second();
        }
    }
    static __device__ __forceinline__ void begin_consumer(const Params& p) {
        const int items = num_items(p, num_head_tiles(p)), ctas = read_num_ctas();
        if (threadIdx.x >= 32 || !finds_second(items, ctas)) return;
        const int found = find_second(p, num_head_tiles(p), items, ctas);
        if (threadIdx.x == 0) second() = found;
        named_barrier_arrive(SECOND_FOUND, WARPGROUP + 32);
    }
    // -1 if the CTA has no second item.
    static __device__ __forceinline__ int find_second(const Params& p, int head_tiles, int items, int ctas) {
        const int lane = threadIdx.x, self = blockIdx.x, more = items - ctas;
        auto pairs_of = [&](uint32_t item) {
            return min(num_pairs(rows_of(p, item / uint32_t(head_tiles)).count()), MOST_SORTED);
        };
        const int mine = pairs_of(self);
        uint32_t seconds = 0;  // five bits for each of the lane's second items: its pairs + 1; 0: there is none
        int rank = 0;          // CTAs whose first items have fewer pairs
#pragma unroll 1
        for (int i = 0; i < SECOND_ITEMS; ++i) {
            const int n = 32 * i + lane, pairs = pairs_of(min(n, ctas - 1));
            rank += __popc(__ballot_sync(~0u, n < ctas && (pairs < mine || (pairs == mine && n < self))));
            seconds |= (n < more ? pairs_of(min(ctas + n, items - 1)) + 1 : 0) << 5 * i;
        }
        if (rank >= more) return -1;
#pragma unroll 1
        for (uint32_t pairs = MOST_SORTED + 1;; --pairs) {
#pragma unroll 1
            for (int i = 0; i < SECOND_ITEMS; ++i) {
                uint32_t found = __ballot_sync(~0u, (seconds >> 5 * i & 31) == pairs);
                const int number = __popc(found);
                if (rank < number) {
#pragma unroll 1
                    for (; rank > 0; --rank) found &= found - 1;
                    return ctas + 32 * i + __ffs(found) - 1;
                }
                rank -= number;
            }
        }
    }
    static constexpr int SECOND_ITEMS = 6, MOST_SORTED = 30;  // second items of a lane; pairs that count
#endif
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
extern "C" __device__ int kernel_shared_bytes = DENSE_SHARED_BYTES + 16 * SORT_SECOND_ITEMS;
