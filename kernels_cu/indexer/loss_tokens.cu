// Counts the tokens of the indexer's loss: those that the caller lets count and whose list has a valid entry.
//
//   one warp   a token: looks through its list up to a valid entry, then adds 1 to the number
#include "ptx/types.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;

// cupy_mla/cuda/training.py declares the same fields.
struct LossTokensParams {
    const int32_t* indices;  // [tokens, topk]; null: entry j is key j
    const int32_t* starts;   // [tokens] the list's first entry; null: 0
    const int32_t* ends;     // [tokens] the entry behind the last one; null: topk
    const uint8_t* counted;  // [tokens] whether they may count, or null
    int32_t* number;         // 0 before the launch
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
