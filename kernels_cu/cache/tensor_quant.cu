// Quantizes a whole tensor to e4m3 under one scale s = 448 / max(amax, 1e-10): writes the codes of clamp(x * s), and 1
// / s.
//
//   grid       launched cooperatively: all CTAs run at the same time and may wait for each other
//   pass 1     a CTA takes every gridDim-th tile of 2 x 2048 values, 2 x 8 values a thread. Its largest magnitude goes
//              to state->amax by one atomic maximum of the bits. Their order does not matter, and NaN has the largest
//              bits
//   meet       each CTA adds itself to state->arrived, and waits until all have
//   pass 2     the same tiles in reverse order, since L2 still has what pass 1 read last. A thread stores 8 codes at a
//              time
//
// Shared memory: 32 bytes. `state` is cleared before the launch.
#include "rows/quantize.cuh"

// The launcher declares the same fields.
struct State {
    uint32_t amax;     // bits of a float32
    uint32_t arrived;  // CTAs that have done pass 1
};

// The launcher declares the same fields.
struct TensorQuantParams {
    const void* x;   // [size] bf16, or float32 with FLOAT32
    uint8_t* codes;  // [size]
    float* scale;    // 1 / s
    State* state;
    int64_t size;
    int64_t tiles;
    int32_t aligned;  // x allows 16-byte accesses; codes always allow 8-byte ones
};

constexpr int ROUNDS = 2, THREADS = VALUES_PER_TILE / (ROUNDS * CHUNK);
constexpr int64_t TILE = VALUES_PER_TILE;
constexpr float LEAST_AMAX = 1e-10f;

// Eight values from `at` on, zeros beyond the end.
__device__ __forceinline__ void load_values(const TensorQuantParams& p, int64_t at, float (&v)[CHUNK]) {
#if FLOAT32
    const auto* x = static_cast<const float*>(p.x) + at;
    if (p.aligned && at + CHUNK <= p.size) {
        const float4 lo = *reinterpret_cast<const float4*>(x), hi = *reinterpret_cast<const float4*>(x + 4);
        v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w, v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) v[i] = at + i < p.size ? x[i] : 0.0f;
#else
    const auto* x = static_cast<const bf16*>(p.x) + at;
    if (p.aligned && at + CHUNK <= p.size) {
        widen_8(*reinterpret_cast<const Vec16*>(x), v);
        return;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) v[i] = at + i < p.size ? bf16_to_float(x[i]) : 0.0f;
#endif
}

__device__ __forceinline__ void load_tile(const TensorQuantParams& p, int64_t tile, float (&v)[ROUNDS][CHUNK]) {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) load_values(p, tile * TILE + (i * THREADS + threadIdx.x) * CHUNK, v[i]);
}

__device__ __forceinline__ void store_codes(const TensorQuantParams& p, int64_t at, const Vec8& codes) {
    if (at + CHUNK <= p.size) {
        *reinterpret_cast<Vec8*>(p.codes + at) = codes;
        return;
    }
    const uint32_t w[2] = {codes.x, codes.y};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
        if (at + i < p.size) p.codes[at + i] = uint8_t(w[i / 4] >> (8 * (i % 4)));
}

// Brings the largest magnitude of the CTA's threads, as bits, to state->amax.
__device__ __forceinline__ void publish_amax(const TensorQuantParams& p, uint32_t amax) {
    __shared__ uint32_t of_warp[THREADS / 32];
    amax = __reduce_max_sync(~0u, amax);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = amax;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < THREADS / 32; ++w) amax = max(amax, of_warp[w]);
    atomicMax(&p.state->amax, amax);
}

// Waits until every CTA has come here. What they published before is then visible.
__device__ __forceinline__ void meet(const TensorQuantParams& p) {
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&p.state->arrived, 1u);
        while (*reinterpret_cast<volatile uint32_t*>(&p.state->arrived) < gridDim.x) {
        }
        __threadfence();
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    tensor_quant(const __grid_constant__ TensorQuantParams p) {
    uint32_t amax = 0;
    for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        float v[ROUNDS][CHUNK];
        load_tile(p, tile, v);
#pragma unroll
        for (int i = 0; i < ROUNDS * CHUNK; ++i) amax = max(amax, __float_as_uint(fabsf(v[i / CHUNK][i % CHUNK])));
    }
    publish_amax(p, amax);
    meet(p);

    const float largest = __uint_as_float(*reinterpret_cast<volatile uint32_t*>(&p.state->amax));
    const float s = divide_exactly(E4M3_MAX, largest < LEAST_AMAX ? LEAST_AMAX : largest);
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = divide_exactly(1.0f, s);
    const int64_t last = (p.tiles - 1 - blockIdx.x) / gridDim.x * gridDim.x + blockIdx.x;  // of this CTA's tiles
    for (int64_t tile = last; tile >= 0; tile -= gridDim.x) {
        float v[ROUNDS][CHUNK];
        load_tile(p, tile, v);
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) v[i][j] *= s;  // the conversion saturates
            store_codes(p, tile * TILE + (i * THREADS + threadIdx.x) * CHUNK, pack_e4m3_8(v[i]));
        }
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
