// The schedule of paged logits: the units of keys of all requests dealt out to equal shares, once for all layers. One
// CTA a share.
//
// The logits' kernel reads it without waiting for the launches before its own. So this kernel must not let the next one
// start early, as kernels with let_next_kernel_start do: whatever is launched behind it starts when its CTAs have ended,
// and none of these ends before what it wrote can be seen by others.
#include "indexer/keys.cuh"
#include "indexer/schedule.cuh"

constexpr int THREADS = 128;
constexpr int EVERY_QUERY = 1 << 20;  // of a request, in one tile

extern "C" __global__ void __launch_bounds__(THREADS) schedule(const __grid_constant__ LogitsParams p) {
    const Share share = share_of_cta<THREADS, EVERY_QUERY, SCHEDULE_UNIT>(p);
    const int word = threadIdx.x;
    if (word >= SCHEDULE_WORDS) return;
    int ends[SCHEDULE_REQUESTS] = {};
    for (int i = 0; i < SCHEDULE_REQUESTS; ++i) {
        const int request = share.tile + i;
        if (share.count > 0 && request < p.requests) ends[i] = range_of_tile(p, tile_of<EVERY_QUERY>(p, request)).end;
    }
    int value;
    if (word < SCHEDULE_BLOCKS_AT) {
        value = word == 0 ? share.tile : word == 1 ? share.place : word == 2 ? share.count : ends[word == 4];
    } else {
        int unit = share.place + word - SCHEDULE_BLOCKS_AT;
        const int units = units_in<SCHEDULE_UNIT>({0, ends[0]});
        const bool next = unit >= units;
        if (next) unit -= units;
        value = block_of_key(p, share.tile + next, unit * SCHEDULE_UNIT, ends[next]).block;
    }
    reinterpret_cast<int32_t*>(p.out)[blockIdx.x * p.out_stride + word] = value;
    __threadfence();
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
