// Packs new tokens into a paged KV cache of one layout.
//
//   one warp     4 tokens
//     load       a latent row is 64 chunks of 8 values: lane l loads chunks l and 32 + l. In rows of 576 values the
//                RoPE values of the 4 tokens are 32 more chunks, one a lane. All loads are under way together
//     find       lane l finds where token l % 4 goes: one division of a slot for 4 tokens
//     quantize   a scale tile is the values of 16 neighbouring lanes (V32_FP8: 128 values), 8 (V4_FP8: 64), 4
//                (V41_FP8: 32) or 2 (NVFP4: 16), in each half of the row. One register has the largest magnitudes of a
//                tile in the first half and of one in the second, so that one set of shuffles finds both (NVFP4: two
//                sets). PLAIN_FP8: the call's scale is that of all values, the RoPE values too
//     store      8 bytes of e4m3, 4 of e2m1 or 16 of bf16 a chunk; neighbouring lanes store neighbouring chunks
//                V4_FP8, V4_NVFP4: the last 8 chunks are RoPE values and stay bf16
//
// Rounded: a value divided by its scale, once, to e4m3 or e2m1, with the bits of a float32 division; and the scale
// itself. Exact: values that stay bf16.
//
// ALIGNED: all arrays allow 16-byte accesses. It is a constant of the variant: where the same load may be one wide
// load or eight narrow ones, the compiler waits for it before it starts the next one, and the eight need registers.
//
// Tokens whose slot is negative or beyond the cache are skipped. No shared memory.
#include "rows/call_scale.cuh"
#include "rows/chunk.cuh"
#include "rows/place.cuh"
#include "rows/quantize.cuh"
#include "rows/scales.cuh"

// The launcher declares the same fields.
struct PackParams {
    const bf16* latent;  // [num_tokens, 512]
    const bf16* rope;    // [num_tokens, 64]; V4_FP8 and rows of 512: part of the latent row
    uint8_t* cache;
    const int64_t* slots;   // [num_tokens]
    int64_t latent_stride;  // items
    int64_t rope_stride;
    int64_t block_stride;  // bytes
    int64_t row_stride;
    int64_t num_slots;
    int32_t block_size;
    int32_t num_tokens;
    int32_t round_up;   // scales. V32_FP8: up to powers of two. NVFP4: up to e4m3 numbers, not to the nearest
    float least_scale;  // the least UE8M0 scale, a power of two; V32_FP8: of float32 scales, a power of two or 0
    CallScale k_scale;  // PLAIN_FP8: the scale of all rows
};

constexpr int ROWS = 4, WARPS = TOKENS_PER_BLOCK / ROWS, THREADS = 32 * WARPS;
constexpr bool ROPE_APART = D_QK > D_V, ROPE_QUANTIZED = D_NOPE > D_V;
constexpr int ROPE_CODES = ROPE_QUANTIZED ? D_V : ROPE_OFFSET;  // where RoPE values stand that are e4m3
constexpr int ROPE_CHUNKS = 32 / ROWS;                          // of a token, a chunk a lane
static_assert(!ROPE_APART || D_QK - D_V == ROPE_CHUNKS * CHUNK, "");

#if !QUANTIZED_ROWS

__device__ __forceinline__ void store_token(const PackParams& p, const RowPlace<int64_t>& to, const Vec16& first,
                                            const Vec16& second) {
    bf16* row = reinterpret_cast<bf16*>(p.cache + to.data) + threadIdx.x % 32 * CHUNK;
    store_chunk(row, first, ALIGNED);
    store_chunk(row + 32 * CHUNK, second, ALIGNED);
}

#elif SCALE_OF_CALL

__device__ __forceinline__ void store_token(const PackParams& p, const RowPlace<int64_t>& to, const Vec16& first,
                                            const Vec16& second) {
    const float scale = load_call_scale(p.k_scale);
    uint8_t* row = p.cache + to.data + threadIdx.x % 32 * CHUNK;
    *reinterpret_cast<Vec8*>(row) = quantize_8<true>(first, scale);
    *reinterpret_cast<Vec8*>(row + 32 * CHUNK) = quantize_8<true>(second, scale);
}

#elif SCALE_E4M3

__device__ __forceinline__ void store_token(const PackParams& p, const RowPlace<int64_t>& to, const Vec16& first,
                                            const Vec16& second) {
    constexpr int TILE_LANES = SCALE_TILE / CHUNK;
    const int lane = threadIdx.x % 32, rope_chunk = 32 + lane - D_NOPE / CHUNK;  // V32_NVFP4: never reaches 0
    const uint32_t scale = nvfp4_scale(amax_or_nan<TILE_LANES>(first), p.round_up),
                   second_scale = nvfp4_scale(amax_or_nan<TILE_LANES>(second), p.round_up);
    uint8_t *row = p.cache + to.data, *scales = p.cache + to.scales;
    *reinterpret_cast<uint32_t*>(row + lane * CHUNK / 2) = quantize_nvfp4_8(first, scale);
    if (rope_chunk < 0) {
        *reinterpret_cast<uint32_t*>(row + (32 + lane) * CHUNK / 2) = quantize_nvfp4_8(second, second_scale);
    } else {
        *reinterpret_cast<Vec16*>(row + ROPE_OFFSET + rope_chunk * 16) = second;
    }
    if (lane % TILE_LANES == 0) {
        store_e4m3_scale(scales, lane / TILE_LANES, scale);
        store_e4m3_scale(scales, (32 + lane) / TILE_LANES, second_scale);
    }
}

#else

// Codes of 0 under a scale of 0, which only float32 scales may be.
__device__ __forceinline__ Vec8 quantize_tile_8(const Vec16& x, float scale) {
    const Vec8 codes = quantize_8(x, scale);
    return SCALE_E8M0 ? codes : codes_under(codes, scale);
}

__device__ __forceinline__ void store_token(const PackParams& p, const RowPlace<int64_t>& to, const Vec16& first,
                                            const Vec16& second) {
    constexpr int TILE_LANES = SCALE_TILE / CHUNK;
    const int lane = threadIdx.x % 32, rope_chunk = 32 + lane - D_NOPE / CHUNK;  // V32_FP8: never reaches 0
    const uint32_t amax = tile_amax<TILE_LANES>(first, second);
    const float scale = scale_of_values(bf16_low(amax), p.round_up, p.least_scale),
                second_scale = scale_of_values(bf16_high(amax), p.round_up, p.least_scale);
    uint8_t *row = p.cache + to.data, *scales = p.cache + to.scales;
    *reinterpret_cast<Vec8*>(row + lane * CHUNK) = quantize_tile_8(first, scale);
    if (rope_chunk < 0) {
        *reinterpret_cast<Vec8*>(row + (32 + lane) * CHUNK) = quantize_tile_8(second, second_scale);
    } else {
        *reinterpret_cast<Vec16*>(row + ROPE_OFFSET + rope_chunk * 16) = second;
    }
    if (lane % TILE_LANES == 0) {
        store_scale(scales, lane / TILE_LANES, scale);
        store_scale(scales, (32 + lane) / TILE_LANES, second_scale);
    }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, ALIGNED ? 4 : 1) pack(const __grid_constant__ PackParams p) {
    const int lane = threadIdx.x % 32, last = p.num_tokens - 1;
    const int token = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    const int64_t slot = token + lane % ROWS <= last ? p.slots[token + lane % ROWS] : -1;
    Vec16 first[ROWS], second[ROWS], rope;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // behind the last token it is loaded again, but not stored
        const bf16* from = p.latent + min(token + r, last) * p.latent_stride + lane * CHUNK;
        first[r] = load_chunk(from, ALIGNED);
        second[r] = load_chunk(from + 32 * CHUNK, ALIGNED);
    }
    const int rope_row = lane / ROPE_CHUNKS, rope_chunk = lane % ROPE_CHUNKS;
    if (ROPE_APART)
        rope = load_chunk(p.rope + min(token + rope_row, last) * p.rope_stride + rope_chunk * CHUNK, ALIGNED);

    const RowPlace<int64_t> mine = place_of_slot(slot, p.num_slots, p.block_size, p.block_stride, p.row_stride);
    const int64_t rope_to = __shfl_sync(~0u, mine.data, rope_row);
    if ((ROPE_QUANTIZED || ROPE_CODED) && rope_to >= 0) {
        *reinterpret_cast<Vec8*>(p.cache + rope_to + ROPE_CODES + rope_chunk * CHUNK) =
            quantize_8<true>(rope, ROPE_QUANTIZED ? load_call_scale(p.k_scale) : 1.0f);
    } else if (ROPE_APART && rope_to >= 0) {
        store_chunk(reinterpret_cast<bf16*>(p.cache + rope_to + ROPE_OFFSET) + rope_chunk * CHUNK, rope, ALIGNED);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        RowPlace<int64_t> to = {__shfl_sync(~0u, mine.data, r), 0};
        to.scales = SCALES_APART ? __shfl_sync(~0u, mine.scales, r) : to.data + SCALE_OFFSET;
        if (to.data >= 0) store_token(p, to, first[r], second[r]);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
