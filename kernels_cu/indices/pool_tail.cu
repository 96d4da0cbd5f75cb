// Copies keys and gates of the last query tokens of each request to its ring. There the next steps find the tokens of
// a pool that is not whole yet (pool_keys.cu). A token at position i goes to place i % ring.
//
//   one warp   a token; lane l has values 4 l .. 4 l + 3
//
// No shared memory.
#include "indices/queries.cuh"

// The launcher declares the same fields.
struct PoolTailParams {
    Queries queries;
    const bf16* k;            // [num_tokens, 128]
    const bf16* gate;         // [num_tokens, 128]
    bf16* tail;               // [num_rings, 2, ring, 128]
    const int32_t* ring_ids;  // [num_requests]
    int64_t k_stride;         // items
    int64_t gate_stride;
    int64_t tail_stride;  // from ring to ring
    int32_t ring;         // tokens that a ring holds
    int32_t num_rings;
};

constexpr int D = 128, THREADS = 32 * TOKENS_PER_BLOCK, VALUES = D / 32;  // of a lane

extern "C" __global__ void __launch_bounds__(THREADS) pool_tail(const __grid_constant__ PoolTailParams p) {
    const int token = (blockIdx.x * THREADS + threadIdx.x) / 32, at = VALUES * (threadIdx.x % 32);
    if (token >= p.queries.num_tokens) return;
    const int32_t request = request_of(p.queries, token), position = position_of(p.queries, request, token);
    if (position < 0 || position < p.queries.seq_lens[request] - p.ring) return;
    const int32_t id = p.ring_ids[request];
    if (uint32_t(id) >= uint32_t(p.num_rings)) return;
    bf16* to = p.tail + id * p.tail_stride + (position % p.ring) * D + at;
    const bf16 *k = p.k + token * p.k_stride + at, *gate = p.gate + token * p.gate_stride + at;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        to[i] = k[i];
        to[int64_t(p.ring) * D + i] = gate[i];
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
