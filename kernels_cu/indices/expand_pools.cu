// Expands a token's list of chosen pools to the positions of the pools' tokens. Behind these come the last tokens of
// the sequence, which make no whole pool.
//
//   one CTA   a token. 256 threads take 256 pools at a time. Sums over lanes and warps tell how many valid pools stand
//             before each, and so where its tokens go. The list has no gaps, and -1 behind its end
//
// Shared memory (static): 64 bytes, the warps' sums of two turns, so that one barrier a turn is enough.
#include "rows/block_table.cuh"
#include "tile/warp.cuh"

// The launcher declares the same fields.
struct ExpandPoolsParams {
    Divisor pool;             // tokens of a pool
    int32_t pools;            // entries of a list of pools
    const int32_t* chosen;    // [tokens, pools]
    const int32_t* seq_lens;  // [tokens] positions that each token sees
    int32_t* out;             // [tokens, pools * tokens of a pool + tokens of a pool - 1]
    int32_t* lens;            // [tokens]
    int64_t chosen_stride;    // items
    int64_t out_stride;
};

constexpr int THREADS = 256, WARPS = THREADS / 32;

__shared__ int32_t warp_sums[2][WARPS];

extern "C" __global__ void __launch_bounds__(THREADS) expand_pools(const __grid_constant__ ExpandPoolsParams p) {
    const int32_t* chosen = p.chosen + blockIdx.x * p.chosen_stride;
    int32_t* out = p.out + blockIdx.x * p.out_stride;
    const int32_t seen = max(p.seq_lens[blockIdx.x], 0), pool = int32_t(p.pool.value);
    const int32_t whole = divide(seen, p.pool);
    int32_t count = 0;
    int turn = 0;
    for (int begin = 0; begin < p.pools; begin += THREADS, turn ^= 1) {
        const int at = begin + threadIdx.x;
        const int32_t id = at < p.pools ? chosen[at] : -1;
        const int32_t valid = uint32_t(id) < uint32_t(whole);
        int32_t total;
        const int32_t place = count + cta_sum_before(valid, warp_sums[turn], total);
        if (valid) {
            for (int i = 0; i < pool; ++i) out[int64_t(place) * pool + i] = id * pool + i;
        }
        count += total;
    }
    const int32_t chosen_tokens = count * pool, tail = seen - whole * pool;
    const int32_t width = p.pools * pool + pool - 1;
    for (int at = chosen_tokens + threadIdx.x; at < width; at += THREADS) {
        const int32_t i = at - chosen_tokens;
        out[at] = i < tail ? whole * pool + i : -1;
    }
    if (threadIdx.x == 0) p.lens[blockIdx.x] = chosen_tokens + tail;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
