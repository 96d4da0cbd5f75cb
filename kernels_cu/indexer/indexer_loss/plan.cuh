// indexer_loss' constants, parameters and shared memory, and the CTA's token.
#pragma once
#include "ptx/shared.cuh"
#include "rows/chunk.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

constexpr int D = 128, LINE = 2 * D, CHUNKS = D / CHUNK;  // values, bytes and chunks of a query or key
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int KEYS = 32, ROUND = WARPS * KEYS;  // keys whose scores a warp, and the CTA, computes at a time
constexpr int PIECES = D / 32;                  // of 64 bytes, of a key
constexpr int N_TILES = HEADS / 8;              // of 8 heads, the n of an mma
constexpr int TILE_KEYS = 64;                   // of gradients
constexpr int COLUMN_GROUPS = WARPS / (HEADS / 16), COLUMNS = D / COLUMN_GROUPS;  // a warp has 16 heads x COLUMNS of U
static_assert(COLUMN_GROUPS * HEADS == 16 * WARPS && COLUMNS % 16 == 0, "");
constexpr float LEAST = 1e-10f;  // divisors and arguments of logarithms are at least this

constexpr int BITS_BYTES = TILE_KEYS / 16 * N_TILES * 16;
constexpr int PLANES = QUANTIZED ? 2 : 1;  // of dI: as it is, and times the keys' scales
// Where things stand in a tile, and in shared memory.
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
    const int32_t* places;  // [tokens, topk] where these entries stood in the caller's list
    const int32_t* counts;  // [tokens] valid entries
    const int32_t* number;  // of tokens that count, which divides the loss; null: nothing does
    const float* q_scales;  // [tokens, heads]; null where not QUANTIZED
    const float* k_scales;  // [keys]; null where not QUANTIZED
    float* scores;          // [tokens, PLANES, padded], later dI
    Vec16* bits;            // [tokens, padded / 16, N_TILES]: of 16 keys and 8 heads each (scores.cuh)
    float* divergences;     // [tokens]
    bf16* contributions;    // [tokens, topk, D]; null: no gradients
    void* dq;               // [tokens, heads, D] float32 or bfloat16
    float* dw;              // [tokens, heads]
    int64_t q_token, q_head, k_row, w_token, target_token, dq_token, dq_head, dw_token;  // items
    int32_t heads, topk, padded;  // padded: topk, rounded up to a multiple of TILE_KEYS
    float coeff;
    int32_t relu;
    int32_t wide;        // dq is float32
    int32_t aligned;     // rows of q and k start at multiples of 16 bytes
    int32_t aligned_dq;  // rows of dq allow stores of two values
};

extern __shared__ __align__(128) uint8_t shared[];
__shared__ float warp_sums[WARPS], of_columns[WARPS][16];

// Shared addresses of a chunk of a query, of a tile, and of a chunk of a tile's key.
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
    // The key of an entry; null behind the list's end.
    __device__ __forceinline__ const bf16* key(const IndexerLossParams& p, int entry) const {
        return entry < count ? p.k + rows[entry] * p.k_row : nullptr;
    }
    // x times the scale of the entry's key.
    __device__ __forceinline__ float scaled(const IndexerLossParams& p, int entry, float x) const {
        if constexpr (QUANTIZED) x *= p.k_scales[rows[entry]];
        return x;
    }
};
