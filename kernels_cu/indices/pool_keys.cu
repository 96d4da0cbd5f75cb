// Computes the indexer's key of each pool that a query token completes: the mean of the pool's keys, each value
// weighted by the softmax of its gates, then a Hadamard transform. Row t of the result belongs to query token t; it is
// zeros where the token completes no pool.
//
//   one warp   a token; lane l has values 4 l .. 4 l + 3
//     mean     two passes over the pool's tokens, for the largest gate and for the sums. Tokens of this step are read
//              from `k` and `gate`, earlier ones from the request's ring, which the kernel pool_tail writes afterwards
//     Hadamard strides 1 and 2 within a lane, 4 to 64 by shuffles, in float32
//
// The exponential is approximate. Sums are float32; the mean and the result are rounded to bfloat16. No shared memory.
#include "indices/queries.cuh"
#include "ptx/convert.cuh"
#include "rows/block_table.cuh"

// The launcher declares the same fields.
struct PoolKeysParams {
    Queries queries;
    Divisor pool;             // tokens of a pool
    int32_t ring;             // tokens that a ring holds
    const bf16* k;            // [num_tokens, 128]
    const bf16* gate;         // [num_tokens, 128]
    const float* ape;         // [tokens of a pool, 128] added to the gates
    const bf16* tail;         // [num_rings, 2, ring, 128] keys and gates
    const int32_t* ring_ids;  // [num_requests]
    bf16* out;                // [num_tokens, 128]
    int64_t k_stride;         // items
    int64_t gate_stride;
    int64_t ape_stride;
    int64_t tail_stride;  // from ring to ring
    int64_t out_stride;
    int32_t num_rings;
    int32_t unused;
};

constexpr int D = 128, THREADS = 32 * TOKENS_PER_BLOCK, VALUES = D / 32;  // of a lane
constexpr float SCALE = 0.08838834764831845f;                             // 1 / sqrt(128)

__device__ __forceinline__ void load_values(const bf16* from, float (&v)[VALUES]) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) v[i] = bf16_to_float(from[i]);
}

__device__ __forceinline__ void hadamard(float (&v)[VALUES]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < VALUES; step *= 2) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            if (i & step) continue;
            const float a = v[i], b = v[i | step];
            v[i] = add_exactly(a, b);
            v[i | step] = subtract_exactly(a, b);
        }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const float other = __shfl_xor_sync(~0u, v[i], step);
            v[i] = lane & step ? subtract_exactly(other, v[i]) : add_exactly(v[i], other);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_keys(const __grid_constant__ PoolKeysParams p) {
    const int token = (blockIdx.x * THREADS + threadIdx.x) / 32, lane = threadIdx.x % 32, at = VALUES * lane;
    if (token >= p.queries.num_tokens) return;
    const int32_t request = request_of(p.queries, token), position = position_of(p.queries, request, token);
    const int32_t pool = int32_t(p.pool.value);
    int32_t first = -1;  // position of the pool's first token
    bool whole = position >= 0 && position < 0x7fffffff;
    if (whole) {
        const int32_t pools = divide(position + 1, p.pool);
        whole = pools * pool == position + 1;
        first = position + 1 - pool;
    }
    const int32_t before = whole ? token - p.queries.starts[request] : 0;  // tokens of the request in this step
    const bf16* ring = nullptr;
    if (whole && before < pool - 1) {
        const int32_t id = p.ring_ids[request];
        if (uint32_t(id) < uint32_t(p.num_rings)) ring = p.tail + id * p.tail_stride;
        whole = ring != nullptr;
    }
    float x[VALUES] = {};
    if (whole) {
        float largest[VALUES], sum[VALUES] = {};
        for (int pass = 0; pass < 2; ++pass) {
            for (int j = 0; j < pool; ++j) {
                const int back = pool - 1 - j;    // tokens behind token j in the pool
                const bool now = back <= before;  // it is one of this step
                const int64_t in_ring = int64_t((first + j) % p.ring) * D;
                float gate[VALUES], key[VALUES];
                load_values((now ? p.gate + (token - back) * p.gate_stride : ring + p.ring * D + in_ring) + at, gate);
                if (pass == 1) load_values((now ? p.k + (token - back) * p.k_stride : ring + in_ring) + at, key);
#pragma unroll
                for (int i = 0; i < VALUES; ++i) {
                    gate[i] += p.ape[j * p.ape_stride + at + i];
                    if (pass == 0) {
                        largest[i] = j == 0 ? gate[i] : fmaxf(largest[i], gate[i]);
                    } else {
                        const float weight = exp2_approx((gate[i] - largest[i]) * LOG2E);
                        sum[i] += weight;
                        x[i] += weight * key[i];
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < VALUES; i += 2) {
            const uint32_t mean = pack_bf16x2(divide_exactly(x[i], sum[i]), divide_exactly(x[i + 1], sum[i + 1]));
            x[i] = bf16_low(mean);
            x[i + 1] = bf16_high(mean);
        }
        hadamard(x);  // the warp has one token, so all its lanes are here
    }
    bf16* out = p.out + token * p.out_stride + at;
#pragma unroll
    for (int i = 0; i < VALUES; i += 2) {
        const uint32_t two = pack_bf16x2(multiply_exactly(x[i], SCALE), multiply_exactly(x[i + 1], SCALE));
        out[i] = bf16(two);
        out[i + 1] = bf16(two >> 16);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
