// Writes tokens' 128 indexer keys as e4m3 under one scale a token (layout INDEXER_FP8, cupy_mla/layouts.py).
//
//   half a warp   one token a turn, 4 turns whose loads are all under way before the first is needed: 16 bytes of keys
//                 and the slot in every lane
//   a lane        8 keys in, 8 bytes of e4m3 out; the largest magnitude meets over 16 lanes by shuffles
//
// In a block of the cache the keys of all tokens come first and their scales after them. No shared memory; 64 tokens a
// block. Slots that are negative or beyond the cache are skipped.
#include "tile/chunk.cuh"
#include "tile/quantize.cuh"

struct Params {
    const bf16* k;           // [num_tokens, 128]
    uint8_t* cache;
    const int64_t* slots;    // [num_tokens]
    int64_t k_stride;        // items
    int64_t block_stride;    // bytes
    int64_t num_slots;
    int32_t block_size;
    int32_t num_tokens;
    int32_t power_of_two;    // round scales up to powers of two
    int32_t flags;           // which arrays allow wide accesses
};

constexpr int ALIGNED_K = 1, ALIGNED_CACHE = 2;
constexpr int THREADS = 256, LANES = D_NOPE / CHUNK, TURNS = 4;
constexpr int TOKENS_PER_BLOCK = THREADS / LANES * TURNS;
static_assert(LANES == 16, "half a warp has a token");

__device__ __forceinline__ float token_amax(const float (&v)[CHUNK]) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) amax = fmaxf(amax, fabsf(v[i]));  // leaves NaN aside
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
    return amax;
}

__device__ __forceinline__ void store_keys(uint8_t* to, const Vec8& v, bool aligned) {
    if (aligned) {
        *reinterpret_cast<Vec8*>(to) = v;
    } else {
        reinterpret_cast<uint32_t*>(to)[0] = v.x;
        reinterpret_cast<uint32_t*>(to)[1] = v.y;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) pack_indexer_keys(const __grid_constant__ Params p) {
    const int lane = threadIdx.x % LANES;
    const int first = blockIdx.x * TOKENS_PER_BLOCK + threadIdx.x / LANES;
    Vec16 keys[TURNS];
    int64_t slot[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const int token = first + i * (THREADS / LANES);
        slot[i] = token < p.num_tokens ? p.slots[token] : -1;
        keys[i] = {0, 0, 0, 0};
        if (token < p.num_tokens) keys[i] = load_chunk(p.k + token * p.k_stride + lane * CHUNK, p.flags & ALIGNED_K);
    }
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        float v[CHUNK];
        widen_8(keys[i], v);
        const float ratio = divide_exactly(fmaxf(token_amax(v), AMAX_FLOOR), E4M3_MAX);
        const float scale = p.power_of_two ? power_of_two_from(ratio) : ratio;
        if (slot[i] < 0 || slot[i] >= p.num_slots) continue;
        const float reciprocal = divide_exactly(1.0f, scale);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j)
            v[j] = scale < INF ? divide_by_scale(v[j], scale, reciprocal) : divide_exactly(v[j], scale);
        uint8_t* block = p.cache + slot[i] / p.block_size * p.block_stride;
        const int offset = int(slot[i] % p.block_size);
        store_keys(block + int64_t(offset) * ROW_STRIDE + lane * CHUNK, pack_e4m3_8(v), p.flags & ALIGNED_CACHE);
        if (lane == 0)
            *reinterpret_cast<float*>(block + int64_t(p.block_size) * ROW_STRIDE + int64_t(offset) * SCALE_STRIDE) = scale;
    }
}
