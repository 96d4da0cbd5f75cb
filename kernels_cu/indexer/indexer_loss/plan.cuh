// Of indexer_loss: constants, the parameter, shared memory, and the CTA's token.
#pragma once
#include "ptx/shared.cuh"
#include "rows/chunk.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

constexpr int D = 128, LINE = 2 * D, CHUNKS = D / CHUNK;  // values, bytes and chunks of a query or key
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int KEYS = 32, ROUND = WARPS * KEYS, PIECES = D / 32;  // of a warp; of a CTA; of 64 bytes of a key
constexpr int N_TILES = HEADS / 8, TILE_KEYS = 64;
constexpr int COLUMN_GROUPS = WARPS / (HEADS / 16), COLUMNS = D / COLUMN_GROUPS;  // of a warp in U
static_assert(COLUMN_GROUPS * HEADS == 16 * WARPS && COLUMNS % 16 == 0, "");
constexpr float LEAST = 1e-10f;  // of a sum that divides, and of what a logarithm is taken of

constexpr int BITS_BYTES = TILE_KEYS / 16 * N_TILES * 16;
constexpr int PLANES = QUANTIZED ? 2 : 1;  // of dI: as it is; times the keys' scales
constexpr int D_SCORES_AT = TILE_KEYS * LINE, SCALED_AT = D_SCORES_AT + (PLANES - 1) * 4 * TILE_KEYS,
              BITS_AT = SCALED_AT + 4 * TILE_KEYS, TILE_BYTES = BITS_AT + BITS_BYTES;
constexpr int Q_AT = 0, TILES_AT = Q_AT + HEADS * LINE, W_AT = TILES_AT + 2 * TILE_BYTES, SCALES_AT = W_AT + 4 * HEADS,
              SHARED_BYTES = SCALES_AT + (QUANTIZED ? 4 * HEADS : 0);
static_assert(TILES_AT % 128 == 0 && TILE_BYTES % 128 == 0 && SHARED_BYTES <= 99 * 1024, "");

// cupy_mla/cuda/training.py declares the same fields.
struct IndexerLossParams {
    const bf16* q;          // [tokens, heads, D]
    const bf16* k;          // [keys, D]
    const float* w;         // [tokens, heads]
    const float* target;    // [tokens, topk]
    const int32_t* rows;    // [tokens, topk] valid entries, ascending
    const int32_t* places;  // [tokens, topk] where they stood in their list
    const int32_t* counts;  // [tokens] how many they are
    const int32_t* number;  // of tokens that count, or null: nothing divides
    const float* q_scales;  // [tokens, heads]; null where not QUANTIZED
    const float* k_scales;  // [keys]; null where not QUANTIZED
    float* scores;          // [tokens, PLANES, padded], then dI
    Vec16* bits;            // [tokens, padded / 16, N_TILES]
    float* divergences;     // [tokens]
    bf16* contributions;    // [tokens, topk, D]; null: no gradients
    void* dq;               // [tokens, heads, D] float32 or bfloat16
    float* dw;              // [tokens, heads]
    int64_t q_token, q_head, k_row, w_token, target_token, dq_token, dq_head, dw_token;  // items
    int32_t heads, topk, padded;  // padded: topk rounded up to a multiple of TILE_KEYS
    float coeff;
    int32_t relu;
    int32_t wide;        // dq is float32
    int32_t aligned;     // rows of q and k start at multiples of 16 bytes
    int32_t aligned_dq;  // rows of dq allow stores of two values
};

extern __shared__ __align__(128) uint8_t shared[];
__shared__ float warp_sums[WARPS], of_columns[WARPS][16];

__device__ __forceinline__ uint32_t q_chunk(int line, int chunk) {
    return shared_address(shared) + Q_AT + line * LINE + swizzle_pairs(line, chunk);
}
__device__ __forceinline__ uint32_t tile_at(int tile) {
    return shared_address(shared) + TILES_AT + tile % 2 * TILE_BYTES;
}
__device__ __forceinline__ uint32_t key_chunk(int tile, int line, int chunk) {
    return tile_at(tile) + line * LINE + swizzle(line, chunk);
}
__device__ __forceinline__ float& weight(int head) { return reinterpret_cast<float*>(shared + W_AT)[head]; }
__device__ __forceinline__ float& scale(int head) { return reinterpret_cast<float*>(shared + SCALES_AT)[head]; }

// x times the head's scale.
__device__ __forceinline__ float scaled(float x, int head) {
    if constexpr (QUANTIZED) x *= scale(head);
    return x;
}

// The CTA's token.
struct Token {
    int index, count;
    const int32_t *rows, *places;
    const float* target;
    float* scores;
    Vec16* bits;

    static __device__ __forceinline__ Token of_cta(const IndexerLossParams& p) {
        const int index = blockIdx.x;
        const int64_t entries = int64_t(index) * p.topk, padded = int64_t(index) * p.padded;
        return {index,
                p.counts[index],
                p.rows + entries,
                p.places + entries,
                p.target + index * p.target_token,
                p.scores + PLANES * padded,
                p.bits + padded / 16 * N_TILES};
    }
    __device__ __forceinline__ const bf16* key(const IndexerLossParams& p, int entry) const {
        return entry < count ? p.k + rows[entry] * p.k_row : nullptr;
    }
    // x times the key's scale.
    __device__ __forceinline__ float scaled(const IndexerLossParams& p, int entry, float x) const {
        if constexpr (QUANTIZED) x *= p.k_scales[rows[entry]];
        return x;
    }
};
