// Writes tokens' 128 indexer keys as e4m3 under one scale a token (layout INDEXER_FP8, cupy_mla/layouts.py).
//
//   one warp     8 tokens: half a warp has one a turn, 4 turns whose loads are all under way at once
//     find       lane l finds where token l % 8 goes
//     a lane     16 bytes of keys in, 8 bytes of e4m3 out; the largest magnitudes of two turns meet by shuffles in one
//                register
//
// ALIGNED: keys allow 16-byte loads and the cache 8-byte stores; known at compile time because a load that may be eight
// is waited for before the next one. In a block of the cache the keys of all tokens come first and their scales after
// them. No shared memory; 64 tokens a block. Slots that are negative or beyond the cache are skipped.
#include "tile/chunk.cuh"
#include "tile/quantize.cuh"

struct PackKeysParams {
    const bf16* k;           // [num_tokens, 128]
    uint8_t* cache;
    const int64_t* slots;    // [num_tokens]
    int64_t k_stride;        // items
    int64_t block_stride;    // bytes
    int64_t num_slots;
    int32_t block_size;
    int32_t num_tokens;
    int32_t power_of_two;    // round scales up to powers of two
    int32_t unused;
};

constexpr int LANES = D_NOPE / CHUNK, TURNS = 4, TOKENS = TURNS * 32 / LANES;  // of a warp
constexpr int WARPS = TOKENS_PER_BLOCK / TOKENS, THREADS = 32 * WARPS;
static_assert(LANES == 16 && TURNS % 2 == 0, "half a warp has a token; two turns share shuffles");

// Where a token goes, in bytes from the start of the cache.
struct Target {
    int64_t keys;   // -1: nowhere
    int64_t scale;
};

__device__ __forceinline__ Target find_target(const PackKeysParams& p, int64_t slot) {
    if (slot < 0 || slot >= p.num_slots) return {-1, -1};
    const int64_t block = slot / p.block_size, offset = slot - block * p.block_size;
    const int64_t start = block * p.block_stride;
    return {start + offset * ROW_STRIDE, start + int64_t(p.block_size) * ROW_STRIDE + offset * SCALE_STRIDE};
}

__device__ __forceinline__ void store_keys(uint8_t* to, const Vec8& v, bool aligned) {
    if (aligned) {
        *reinterpret_cast<Vec8*>(to) = v;
    } else {
        reinterpret_cast<uint32_t*>(to)[0] = v.x;
        reinterpret_cast<uint32_t*>(to)[1] = v.y;
    }
}

__device__ __forceinline__ void store_token(const PackKeysParams& p, const Target& to, const Vec16& keys, float amax) {
    if (to.keys < 0) return;
    const int lane = threadIdx.x % LANES;
    const float ratio = scale_from_amax(fmaxf(amax, AMAX_FLOOR));
    const float scale = p.power_of_two ? power_of_two_from(ratio) : ratio;
    store_keys(p.cache + to.keys + lane * CHUNK, quantize_8(keys, scale), ALIGNED);
    if (lane == 0) *reinterpret_cast<float*>(p.cache + to.scale) = scale;
}

extern "C" __global__ void __launch_bounds__(THREADS, ALIGNED ? 4 : 1)
pack_keys(const __grid_constant__ PackKeysParams p) {
    const int lane = threadIdx.x % 32, half = lane / LANES, last = p.num_tokens - 1;
    const int token = (blockIdx.x * WARPS + threadIdx.x / 32) * TOKENS;
    const int64_t slot = token + lane % TOKENS <= last ? p.slots[token + lane % TOKENS] : -1;
    Vec16 keys[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i)  // past the end the last token is loaded again, and goes nowhere
        keys[i] = load_chunk(p.k + min(token + 2 * i + half, last) * p.k_stride + lane % LANES * CHUNK, ALIGNED);

    const Target mine = find_target(p, slot);
#pragma unroll
    for (int i = 0; i < TURNS; i += 2) {
        const uint32_t amax = tile_amax<LANES>(keys[i], keys[i + 1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int from = 2 * (i + j) + half;
            const Target to = {__shfl_sync(~0u, mine.keys, from), __shfl_sync(~0u, mine.scale, from)};
            store_token(p, to, keys[i + j], j == 0 ? bf16_low(amax) : bf16_high(amax));
        }
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
