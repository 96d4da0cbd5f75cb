// Writes tokens' 128 indexer keys: as e4m3 under one scale a token (layout INDEXER_FP8, cupy_mla/layouts.py), or as
// e2m1 under a power of two a group of 32 (MXFP4, layout INDEXER_MXFP4).
//
//   one warp     8 tokens, in 4 rounds of two: half a warp has a token. The loads of all rounds are under way together
//     find       lane l finds where token l % 8 goes
//     a lane     loads 16 bytes of a key and stores 8 bytes of e4m3. One register has the largest magnitudes of two
//                rounds, so that one set of shuffles finds both
//                MXFP4: it stores 4 bytes; four lanes have a group
//
// ALIGNED: keys allow 16-byte loads and the cache 8-byte stores. It is a constant of the variant: where the same load
// may be one wide load or eight narrow ones, the compiler waits for it before it starts the next one.
//
// A block of the cache holds the keys of all its tokens first, then their scales. Tokens whose slot is negative or
// beyond the cache are skipped. No shared memory.
#include "rows/chunk.cuh"
#include "rows/mxfp4.cuh"
#include "rows/place.cuh"
#include "rows/quantize.cuh"

// The launcher declares the same fields.
struct PackKeysParams {
    const bf16* k;  // [num_tokens, 128]
    uint8_t* cache;
    const int64_t* slots;  // [num_tokens]
    int64_t k_stride;      // items
    int64_t block_stride;  // bytes
    int64_t num_slots;
    int32_t block_size;
    int32_t num_tokens;
    int32_t power_of_two;  // round float32 scales up to powers of two
    int32_t least_scale;   // MXFP4: the byte of the least scale
};

constexpr int LANES = D_NOPE / CHUNK, ROUNDS = 4, TOKENS = ROUNDS * 32 / LANES;  // of a warp
constexpr int WARPS = TOKENS_PER_BLOCK / TOKENS, THREADS = 32 * WARPS;
static_assert(LANES == 16 && ROUNDS % 2 == 0, "half a warp has a token; two rounds share shuffles");

__device__ __forceinline__ void store_keys(uint8_t* to, const Vec8& v, bool aligned) {
    if (aligned) {
        *reinterpret_cast<Vec8*>(to) = v;
    } else {
        reinterpret_cast<uint32_t*>(to)[0] = v.x;
        reinterpret_cast<uint32_t*>(to)[1] = v.y;
    }
}

__device__ __forceinline__ void store_token(const PackKeysParams& p, const RowPlace<int64_t>& to, const Vec16& keys,
                                            float amax) {
    if (to.data < 0) return;
    const int lane = threadIdx.x % LANES;
    const float ratio = scale_from_amax(fmaxf(amax, AMAX_FLOOR));
    const float scale = p.power_of_two ? power_of_two_from(ratio) : ratio;
    store_keys(p.cache + to.data + lane * CHUNK, quantize_8(keys, scale), ALIGNED);
    if (lane == 0) *reinterpret_cast<float*>(p.cache + to.scales) = scale;
}

__device__ __forceinline__ void store_mxfp4_token(const PackKeysParams& p, const RowPlace<int64_t>& to,
                                                  const Vec16& keys) {
    const int lane = threadIdx.x % LANES;
    const uint32_t scale = mxfp4_scale(amax_or_nan<MXFP4_GROUP / CHUNK>(keys), p.least_scale),
                   scales = join_scales(scale, lane);
    if (to.data < 0) return;
    reinterpret_cast<uint32_t*>(p.cache + to.data)[lane] = quantize_e2m1_8(keys, scale);
    if (lane == 0) *reinterpret_cast<uint32_t*>(p.cache + to.scales) = scales;
}

extern "C" __global__ void __launch_bounds__(THREADS, ALIGNED ? 4 : 1)
    pack_keys(const __grid_constant__ PackKeysParams p) {
    const int lane = threadIdx.x % 32, half = lane / LANES, last = p.num_tokens - 1;
    const int token = (blockIdx.x * WARPS + threadIdx.x / 32) * TOKENS;
    const int64_t slot = token + lane % TOKENS <= last ? p.slots[token + lane % TOKENS] : -1;
    Vec16 keys[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)  // behind the last token it is loaded again, but not stored
        keys[i] = load_chunk(p.k + min(token + 2 * i + half, last) * p.k_stride + lane % LANES * CHUNK, ALIGNED);

    const RowPlace<int64_t> mine = place_of_slot(slot, p.num_slots, p.block_size, p.block_stride, ROW_STRIDE);
#pragma unroll
    for (int i = 0; i < ROUNDS; i += 2) {
        const uint32_t amax = MXFP4 ? 0 : tile_amax<LANES>(keys[i], keys[i + 1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int from = 2 * (i + j) + half;
            const RowPlace<int64_t> to = {__shfl_sync(~0u, mine.data, from), __shfl_sync(~0u, mine.scales, from)};
            if constexpr (MXFP4) {
                store_mxfp4_token(p, to, keys[i + j]);
            } else {
                store_token(p, to, keys[i + j], j == 0 ? bf16_low(amax) : bf16_high(amax));
            }
        }
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
