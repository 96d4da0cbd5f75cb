// How many tokens count in the indexer's loss: those with a valid entry that the caller lets count.
//
//   a warp a token; it looks through the list until an entry is valid, and adds 1 to the number
#include "ptx/types.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;

// cupy_mla/cuda/training.py declares the same fields.
struct LossTokensParams {
    const int32_t* indices;  // [tokens, topk]; null: entry j is key j
    const int32_t* starts;   // [tokens] the first entry, or null: 0
    const int32_t* ends;     // [tokens] that behind the last one, or null: topk
    const uint8_t* counted;  // [tokens] whether they may count, or null
    int32_t* number;         // 0 before
    int64_t index_stride;    // items
    int32_t tokens, topk, keys;
};

extern "C" __global__ void __launch_bounds__(THREADS) loss_tokens(const __grid_constant__ LossTokensParams p) {
    const int lane = threadIdx.x % 32, token = blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= p.tokens || (p.counted != nullptr && p.counted[token] == 0)) return;
    const int32_t* list = p.indices == nullptr ? nullptr : p.indices + token * p.index_stride;
    const int start = p.starts == nullptr ? 0 : max(p.starts[token], 0);
    const int end = p.ends == nullptr ? p.topk : min(p.ends[token], p.topk);
#pragma unroll 1
    for (int first = start; first < end; first += 32) {
        const int at = first + lane, entry = at >= end ? -1 : list == nullptr ? at : list[at];
        if (__ballot_sync(~0u, uint32_t(entry) < uint32_t(p.keys)) == 0) continue;
        if (lane == 0) atomicAdd(p.number, 1);
        return;
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
