// How many entries of each query's list count: those up to the last valid one. For lists without lengths, which have -1
// behind the rows of a short context.
//
//   a warp a query; it looks from the end of the list back, AT_ONCE entries of a lane at a time, until one is valid
//
// A full list costs one look at its end.
#include "attention/params.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 32 * QUERIES;
constexpr int AT_ONCE = 16, LOOK = 32 * AT_ONCE;  // entries of a lane, and of a warp, that are under way at a time

// cupy_mla/cuda/structs.py declares the same fields.
struct CountParams : AttentionParams {
    int32_t* counts;  // [num_queries]
};

extern "C" __global__ void __launch_bounds__(THREADS) count_entries(const __grid_constant__ CountParams p) {
    const int lane = threadIdx.x % 32, index = blockIdx.x * QUERIES + threadIdx.x / 32;
    if (index >= p.num_queries) return;
    const Query query = query_of(p, index);
    const int32_t* list = list_of(p.main, query);
    const int end = list_length(p.main, query.b);
    int count = 0;
#pragma unroll 1
    for (int first = (end - 1) / LOOK * LOOK; first >= 0 && count == 0; first -= LOOK) {
        int32_t entries[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = first + 32 * i + lane;
            entries[i] = at < end ? list[at] : -1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (entries[i] >= 0 && entries[i] < p.main.num_slots) count = first + 32 * i + lane + 1;
        }
        count = __reduce_max_sync(~0u, count);
    }
    if (lane == 0) p.counts[index] = count;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
