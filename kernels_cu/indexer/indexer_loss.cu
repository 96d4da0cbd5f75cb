// The indexer's loss of a token, the gradients of its queries and weights, and what it contributes to those of its keys.
// backward_lists.cu has sorted its list; backward_rows.cu adds up what keys get.
//
//   grid   x token
//   CTA    8 warps; the token's heads stand in shared memory. Twice through the list:
//
//   scores     a warp has 32 keys in registers, as A operands. z = K.Q^T, 8 heads at a time; a lane sums w * relu(z) over its
//              heads, a quad over all. Kept in memory: the score of each entry, and one bit a head of it, z > 0
//   both distributions, KL, and from them dI, which takes the scores' place
//   shared memory has w * Q in the place of Q
//   gradients  keys come in tiles of TILE_KEYS, two in turn, with their dI and bits
//                U += (bits * dI)^T.K      a warp has 16 heads x COLUMNS columns; A operands are made of bits
//                C  = dI * (bits.(w * Q))  a warp has 16 keys x 64 columns; written as bf16
//   dq = w * U,  dw = sum over columns of q * U
//
// Keys beyond the list's end are zeros, and so is their dI. Sums have one order, so bits follow from the token's own
// arguments.
//
// QUANTIZED: Q and K are e4m3 numbers (round_rows.cu), times a scale a head and a scale a key. A head's scale goes into its
// weight wherever Q is a factor; a key's into the score, and into the dI that U is made of, a second plane of them.
//
// Shared memory, bytes: 256 HEADS of Q, 4 HEADS of weights; twice a tile: keys 256, dI 4, times TILE_KEYS, and 8 HEADS of
// bits. 64 heads: 50,944; 128: 68,608. QUANTIZED: 4 HEADS of scales and 8 TILE_KEYS more.
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "rows/chunk.cuh"
#include "tile/contributions.cuh"
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

// Queries and weights; heads that do not exist are zeros.
__device__ __forceinline__ void bring_heads(const IndexerLossParams& p, const Token& token) {
    const bf16* q = p.q + token.index * p.q_token;
    for (int item = threadIdx.x; item < HEADS * CHUNKS; item += THREADS) {
        const int head = item / CHUNKS, chunk = item % CHUNKS;
        const bool exists = head < p.heads;
        store_shared_16(q_chunk(head, chunk),
                        exists ? load_chunk(q + head * p.q_head + CHUNK * chunk, p.aligned) : Vec16{});
        if (chunk == 0) weight(head) = exists ? p.w[token.index * p.w_token + head] : 0.0f;
        if constexpr (QUANTIZED) {
            if (chunk == 0) scale(head) = exists ? p.q_scales[int64_t(token.index) * p.heads + head] : 0.0f;
        }
    }
}

// --- scores -----------------------------------------------------------------------------------------------------

// The scores of all entries, and their bits; returns the largest of this thread's.
__device__ __forceinline__ float find_scores(const IndexerLossParams& p, const Token& token) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int end = ceil_div(token.count, TILE_KEYS) * TILE_KEYS;
    float largest = -INF;
#pragma unroll 1
    for (int first = KEYS * warp; first < end; first += ROUND) {
        Vec16 keys[4][PIECES];  // 8 x + g
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const bf16* key = token.key(p, first + 8 * x + g);
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)
                keys[x][piece] = key == nullptr ? Vec16{} : load_chunk(key + 32 * piece + CHUNK * t, p.aligned);
        }
        float sums[4] = {};
#pragma unroll 1
        for (int j = 0; j < N_TILES; ++j) {
            float z[2][4] = {};
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                const Vec16 b = load_shared_16(q_chunk(8 * j + g, 4 * piece + t));
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const Vec16 &low = keys[2 * m][piece], &high = keys[2 * m + 1][piece];
                    mma_m16n8k16(z[m], {low.x, high.x, low.y, high.y}, b.x, b.y);
                    mma_m16n8k16(z[m], {low.z, high.z, low.w, high.w}, b.z, b.w);
                }
            }
            const int head = 8 * j + 2 * t;
            const float w[2] = {scaled(weight(head), head), scaled(weight(head + 1), head + 1)};
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                uint32_t words[4];  // [2 i + k]: bit 4 g + t is of key 8 i + g, head 2 t + k
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    words[i] = __ballot_sync(~0u, !p.relu || z[m][i] > 0.0f);
                    const float kept = p.relu ? max_or_nan(z[m][i], 0.0f) : z[m][i];
                    sums[2 * m + i / 2] = fmaf(kept, w[i % 2], sums[2 * m + i / 2]);
                }
                if (lane == 0 && p.contributions != nullptr)
                    token.bits[(first / 16 + m) * N_TILES + j] = {words[0], words[1], words[2], words[3]};
            }
        }
        const float sum = quad_sum_of_mine(sums, t);
        const int entry = first + 8 * t + g;
        if (entry < token.count) {
            const float score = token.scaled(p, entry, sum);
            token.scores[entry] = score;
            largest = fmaxf(largest, score);
        }
    }
    return largest;
}

// Over the CTA, the same in all threads. All call.
__device__ __forceinline__ float cta_max(float x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < WARPS; ++i) x = fmaxf(x, warp_sums[i]);
    return x;
}
__device__ __forceinline__ float cta_sum(float x) {
    float total;
    __syncthreads();  // all have read the sums before
    cta_sum_before(x, warp_sums, total);
    return total;
}

__device__ __forceinline__ float logarithm(float x) { return log2_approx(x) * LN2; }

// KL of both distributions; dI in the place of the scores, and 0 behind them up to the end of a tile.
__device__ __forceinline__ void compare(const IndexerLossParams& p, const Token& token, float largest) {
    largest = cta_max(largest);
    float exponentials = 0.0f, targets = 0.0f, divergence = 0.0f;
    for (int entry = threadIdx.x; entry < token.count; entry += THREADS) {
        exponentials += exp2_approx((token.scores[entry] - largest) * LOG2E);
        targets += token.target[token.places[entry]];
    }
    exponentials = cta_sum(exponentials);
    targets = max_or_nan(cta_sum(targets), LEAST);
    const float log_sum = logarithm(exponentials);
    const float g = p.number == nullptr ? p.coeff : p.coeff / max(*p.number, 1);
    const int end = ceil_div(token.count, TILE_KEYS) * TILE_KEYS;
    for (int entry = threadIdx.x; entry < end; entry += THREADS) {
        float d_score = 0.0f;
        if (entry < token.count) {
            const float score = token.scores[entry] - largest, predicted = exp2_approx(score * LOG2E) / exponentials;
            const float target = token.target[token.places[entry]] / targets;
            divergence += target * (logarithm(fmaxf(target, LEAST)) - (score - log_sum));
            d_score = g * (predicted - target);
        }
        token.scores[entry] = d_score;
        if constexpr (QUANTIZED) {
            token.scores[p.padded + entry] = entry < token.count ? token.scaled(p, entry, d_score) : 0.0f;
        }
    }
    divergence = cta_sum(divergence);
    if (threadIdx.x == 0) p.divergences[token.index] = divergence;
}

// --- gradients --------------------------------------------------------------------------------------------------

__device__ __forceinline__ void weigh_queries() {
    for (int item = threadIdx.x; item < HEADS * CHUNKS; item += THREADS) {
        const int head = item / CHUNKS;
        const uint32_t at = q_chunk(head, item % CHUNKS);
        const Vec16 v = load_shared_16(at);
        const float w = scaled(weight(head), head);
        const auto times_w = [w](uint32_t two) { return pack_bf16x2(w * bf16_low(two), w * bf16_high(two)); };
        store_shared_16(at, {times_w(v.x), times_w(v.y), times_w(v.z), times_w(v.w)});
    }
}

// Start to copy a tile: keys, dI and bits.
__device__ __forceinline__ void bring_tile(const IndexerLossParams& p, const Token& token, int tile) {
    const int first = tile * TILE_KEYS;
#pragma unroll
    for (int item = threadIdx.x; item < TILE_KEYS * CHUNKS; item += THREADS) {
        const int line = item / CHUNKS, chunk = item % CHUNKS;
        const bf16* key = token.key(p, first + line);
        const uint32_t to = key_chunk(tile, line, chunk);
        if (p.aligned) {
            cp_async_16(to, key + CHUNK * chunk, key != nullptr);
        } else {
            store_shared_16(to, key == nullptr ? Vec16{} : load_chunk(key + CHUNK * chunk, false));
        }
    }
    if (threadIdx.x < PLANES * TILE_KEYS / 4) {
        const int plane = threadIdx.x / (TILE_KEYS / 4), item = threadIdx.x % (TILE_KEYS / 4);
        cp_async_16(tile_at(tile) + D_SCORES_AT + 16 * threadIdx.x, token.scores + plane * p.padded + first + 4 * item,
                    true);
    }
    for (int item = threadIdx.x; item < BITS_BYTES / 16; item += THREADS)
        cp_async_16(tile_at(tile) + BITS_AT + 16 * item, token.bits + first / 16 * N_TILES + item, true);
    cp_async_commit();
}

// Of 16 keys of the tile and 8 heads.
__device__ __forceinline__ Vec16 bits_of(int tile, int keys, int heads) {
    return load_shared_16(tile_at(tile) + BITS_AT + (keys * N_TILES + heads) * 16);
}

// A bit of two words as two bfloat16, 1 or 0; two bits of a word as a mask of two halves.
__device__ __forceinline__ uint32_t ones_of(uint32_t first, uint32_t second, int bit) {
    return (first >> bit & 1) * 0x3f80u | (second >> bit & 1) * 0x3f800000u;
}
__device__ __forceinline__ uint32_t halves_of(uint32_t word, int low, int high) {
    return (word >> low & 1) * 0xffffu | (word >> high & 1) * 0xffff0000u;
}

using OfHeads = float[COLUMNS / 8][4];

// U += (bits * dI)^T.K
__device__ __forceinline__ void multiply_heads(int tile, OfHeads& u) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int heads = warp / COLUMN_GROUPS * 2, column = warp % COLUMN_GROUPS * COLUMNS;
#pragma unroll
    for (int keys = 0; keys < TILE_KEYS / 16; ++keys) {
        const uint32_t at = tile_at(tile) + SCALED_AT + 4 * (16 * keys + 2 * t);
        uint32_t a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Vec16 bits = bits_of(tile, keys, heads + half);
            const Vec8 low = load_shared_8(at), high = load_shared_8(at + 32);
            const uint32_t d_low = pack_bf16x2(__uint_as_float(low.x), __uint_as_float(low.y));
            const uint32_t d_high = pack_bf16x2(__uint_as_float(high.x), __uint_as_float(high.y));
            const int bit = 8 * t + g / 2;  // of keys 2 t and, 4 bits on, 2 t + 1
            a[half] = d_low & halves_of(g % 2 == 0 ? bits.x : bits.y, bit, bit + 4);
            a[half + 2] = d_high & halves_of(g % 2 == 0 ? bits.z : bits.w, bit, bit + 4);
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, key_chunk(tile, 16 * keys + lane / 8 % 2 * 8 + lane % 8, column / 8 + j + lane / 16));
            mma_m16n8k16(u[j], a, b[0], b[1]);
            mma_m16n8k16(u[j + 1], a, b[2], b[3]);
        }
    }
}

// C of the warp's keys and columns, written where the list has them.
__device__ __forceinline__ void contribute(const IndexerLossParams& p, const Token& token, int tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int keys = warp / 2, column = warp % 2 * 64;
    float c[8][4] = {};
#pragma unroll 2
    for (int j = 0; j < N_TILES; j += 2) {
        const Vec16 first = bits_of(tile, keys, j), second = bits_of(tile, keys, j + 1);
        const uint32_t a[4] = {ones_of(first.x, first.y, lane), ones_of(first.z, first.w, lane),
                               ones_of(second.x, second.y, lane), ones_of(second.z, second.w, lane)};
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, q_chunk(8 * j + lane / 8 % 2 * 8 + lane % 8, column / 8 + n + lane / 16));
            mma_m16n8k16(c[n], a, b[0], b[1]);
            mma_m16n8k16(c[n + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int line = 16 * keys + g + 8 * i, entry = tile * TILE_KEYS + line;
        if (entry >= token.count) continue;
        const float d_score = __uint_as_float(load_shared_4(tile_at(tile) + D_SCORES_AT + 4 * line));
        uint32_t pairs[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) pairs[n] = pack_bf16x2(d_score * c[n][2 * i], d_score * c[n][2 * i + 1]);
        store_contribution(p.contributions + (int64_t(token.index) * p.topk + entry) * D + column, t, pairs);
    }
}

// dq and dw of U, which is 0 for a token that does not count.
__device__ __forceinline__ void write_gradients(const IndexerLossParams& p, const Token& token, const OfHeads& u) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = warp / COLUMN_GROUPS * 16, column = warp % COLUMN_GROUPS * COLUMNS + 2 * t;
    const bool counts = token.count > 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int line = g + 8 * i, head = first + line;
        float dw = 0.0f;
        if (head < p.heads) {
            const bf16* q = p.q + token.index * p.q_token + head * p.q_head + column;
            const int64_t at = token.index * p.dq_token + head * p.dq_head + column;
            const float w = counts ? weight(head) : 0.0f;
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j) {
                const float x = u[j][2 * i], y = u[j][2 * i + 1];
                if (counts) dw += bf16_to_float(q[8 * j]) * x + bf16_to_float(q[8 * j + 1]) * y;
                if (p.wide) {
                    store_pair(static_cast<float*>(p.dq) + at + 8 * j, w * x, w * y, p.aligned_dq);
                } else {
                    store_pair(static_cast<bf16*>(p.dq) + at + 8 * j, w * x, w * y, p.aligned_dq);
                }
            }
        }
        dw = quad_sum(dw);
        if (counts) dw = scaled(dw, head);
        if (t == 0) of_columns[warp][line] = dw;
    }
    __syncthreads();
    const int head = threadIdx.x;
    if (head >= p.heads) return;
    float dw = 0.0f;
#pragma unroll
    for (int i = 0; i < COLUMN_GROUPS; ++i) dw += of_columns[head / 16 * COLUMN_GROUPS + i][head % 16];
    p.dw[token.index * p.dw_token + head] = dw;
}

extern "C" __global__ void __launch_bounds__(THREADS) indexer_loss(const __grid_constant__ IndexerLossParams p) {
    const Token token = Token::of_cta(p);
    if (token.count > 0) {
        bring_heads(p, token);
        __syncthreads();
        compare(p, token, find_scores(p, token));
    } else if (threadIdx.x == 0) {
        p.divergences[token.index] = 0.0f;
    }
    if (p.contributions == nullptr) return;
    OfHeads u = {};
    const int tiles = ceil_div(token.count, TILE_KEYS);
    if (tiles > 0) {
        weigh_queries();
        bring_tile(p, token, 0);
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        cp_async_wait<0>();
        __syncthreads();  // the tile is there, and all have read the one before
        if (tile + 1 < tiles) bring_tile(p, token, tile + 1);
        multiply_heads(tile, u);
        contribute(p, token, tile);
    }
    write_gradients(p, token, u);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
