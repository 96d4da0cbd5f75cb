// Sorts index lists by ranges of the cache, for caches that do not fit L2: CTAs that work on different queries then
// read the same range at about the same time.
//
// A CTA sorts SEGMENT entries of a list by the upper bits of the row number, into at most RANGES ranges. Entries of a
// range keep their order, so the result is always the same. Each warp counts the entries of each range in its share of
// the segment. The counts give each range its place; then the warp stores its entries there.
#include "attention/params.cuh"
#include "tile/warp.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int SHARE = SEGMENT / WARPS, BATCH = 8;  // entries of a warp; loads that a lane has in flight

// cupy_mla/cuda/structs.py declares the same fields.
struct SortParams : AttentionParams {
    int32_t* sorted;   // [num_queries, topk]
    int32_t segments;  // of a list
    int32_t shift;     // a row's range is its number >> shift
};

__shared__ int32_t staged[SEGMENT];
__shared__ int places[WARPS][RANGES];

// Calls act(here, entry, range) for this lane's entries, all lanes together. Without `here` there is no entry.
template <typename Do>
__device__ __forceinline__ void for_each_entry(const int32_t* list, int count, int shift, Do act) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = warp * SHARE; first < min(count, (warp + 1) * SHARE); first += 32 * BATCH) {
        int32_t entries[BATCH] = {};
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = first + 32 * i + lane;
            if (at < count) entries[i] = list[at];
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const bool here = first + 32 * i + lane < count;
            act(here, entries[i], int(min(uint32_t(entries[i]) >> shift, uint32_t(RANGES - 1))));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_lists(const __grid_constant__ SortParams p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Query query = query_of(p, blockIdx.x / p.segments);
    const int begin = blockIdx.x % p.segments * SEGMENT, count = min(list_length(p.main, query.b) - begin, SEGMENT);
    const int32_t* list = list_of(p.main, query) + begin;

    places[warp][lane] = 0;
    __syncwarp();
    for_each_entry(list, count, p.shift, [&](bool here, int32_t, int range) {
        if (here) atomicAdd(&places[warp][range], 1);
    });
    __syncthreads();
    int before = 0, all = 0;  // entries in range `lane`: of the warps before this one, and of all warps
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        before += w < warp ? places[w][lane] : 0;
        all += places[w][lane];
    }
    const int place = inclusive_sum(all, lane);
    __syncthreads();
    places[warp][lane] = place - all + before;
    __syncwarp();
    for_each_entry(list, count, p.shift, [&](bool here, int32_t entry, int range) {
        const uint32_t same = lanes_with_same<RANGES>(here, range), earlier = same & ((1u << lane) - 1);
        const int first = places[warp][range];
        __syncwarp();
        if (here && earlier == 0) places[warp][range] = first + __popc(same);
        if (here) staged[first + __popc(earlier)] = entry;
        __syncwarp();
    });
    __syncthreads();
    int32_t* sorted = p.sorted + int64_t(query.index) * p.main.topk + begin;
    for (int i = threadIdx.x; i < count; i += THREADS) sorted[i] = staged[i];
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
