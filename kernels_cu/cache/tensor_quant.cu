// Quantizes a whole tensor to e4m3 under one scale s = 448 / max(amax, 1e-10): writes the codes of clamp(x * s), and 1
// / s.
//
// Two launches, by the constant CODES:
//
//   grid       x as many CTAs in both, each of which takes every gridDim-th tile of 2 x 2048 values, 2 x 8 a thread
//   CODES 0    leaves the CTA's largest magnitude. NaN has the largest bits
//   CODES 1    finds the largest of all CTAs' magnitudes. Then it takes the same tiles in reverse order, since L2 still
//              has what was read last, and stores 8 codes a thread at a time
//
// Shared memory: 32 bytes.
#include "rows/quantize.cuh"

// The launcher declares the same fields.
struct TensorQuantParams {
    const void* x;   // [size] bf16, or float32 with FLOAT32
    uint8_t* codes;  // [size]
    float* scale;    // 1 / s
    uint32_t* amax;  // [CTAs] bits of a float32: the largest magnitude of each CTA's values
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

// The largest of the threads' numbers.
__device__ __forceinline__ uint32_t largest_of_cta(uint32_t x) {
    __shared__ uint32_t of_warp[THREADS / 32];
    x = __reduce_max_sync(~0u, x);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) x = max(x, of_warp[w]);
    return x;
}

__device__ __forceinline__ void find_amax(const TensorQuantParams& p) {
    uint32_t amax = 0;
    for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        float v[ROUNDS][CHUNK];
        load_tile(p, tile, v);
#pragma unroll
        for (int i = 0; i < ROUNDS * CHUNK; ++i) amax = max(amax, __float_as_uint(fabsf(v[i / CHUNK][i % CHUNK])));
    }
    amax = largest_of_cta(amax);
    if (threadIdx.x == 0) p.amax[blockIdx.x] = amax;
}

__device__ __forceinline__ void quantize(const TensorQuantParams& p) {
    uint32_t amax = 0;
    for (int cta = threadIdx.x; cta < gridDim.x; cta += THREADS) amax = max(amax, p.amax[cta]);
    const float largest = __uint_as_float(largest_of_cta(amax));
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

extern "C" __global__ void __launch_bounds__(THREADS) tensor_quant(const __grid_constant__ TensorQuantParams p) {
    if (CODES) {
        quantize(p);
    } else {
        find_amax(p);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
