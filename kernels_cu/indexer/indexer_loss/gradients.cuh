// How indexer_loss computes gradients from dI, the derivative by the scores.
//
//   tile   TILE_KEYS keys with their dI and bits, in one of two places of shared memory
//   U += (bits * dI)^T.K         a warp has 16 heads x COLUMNS columns; A operands are dI, masked by bits
//   C  = dI * (bits.(w * Q))     a warp has 16 keys x 64 columns; A operands are bits as 1 and 0; stored as bfloat16
//   dq = w * U,  dw = sum over columns of q * U
#pragma once
#include "indexer/indexer_loss/plan.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma_sync.cuh"
#include "tile/contributions.cuh"

// Replaces Q by w * Q in shared memory.
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

// Starts the copies of a tile's keys, dI and bits.
__device__ __forceinline__ void start_tile_copies(const IndexerLossParams& p, const Token& token, int tile) {
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

// The bits of 16 keys of the tile and 8 heads.
__device__ __forceinline__ Vec16 bits_of(int tile, int keys, int heads) {
    return load_shared_16(tile_at(tile) + BITS_AT + (keys * N_TILES + heads) * 16);
}

// The same bit of two words as two bfloat16, each 1 or 0.
__device__ __forceinline__ uint32_t ones_of_bits(uint32_t first, uint32_t second, int bit) {
    return (first >> bit & 1) * 0x3f80u | (second >> bit & 1) * 0x3f800000u;
}
// Two bits of a word as a mask of two bfloat16.
__device__ __forceinline__ uint32_t mask_of_bits(uint32_t word, int low, int high) {
    return (word >> low & 1) * 0xffffu | (word >> high & 1) * 0xffff0000u;
}

using HeadGradients = float[COLUMNS / 8][4];  // a warp's part of U

// U += (bits * dI)^T.K
__device__ __forceinline__ void multiply_heads(int tile, HeadGradients& u) {
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
            const int bit = 8 * t + g / 2;  // of key 2 t; that of key 2 t + 1 is 4 bits further on
            a[half] = d_low & mask_of_bits(g % 2 == 0 ? bits.x : bits.y, bit, bit + 4);
            a[half + 2] = d_high & mask_of_bits(g % 2 == 0 ? bits.z : bits.w, bit, bit + 4);
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

// C of the warp's keys and columns, stored to the entries' contributions.
__device__ __forceinline__ void contribute(const IndexerLossParams& p, const Token& token, int tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int keys = warp / 2, column = warp % 2 * 64;
    float c[8][4] = {};
#pragma unroll 2
    for (int j = 0; j < N_TILES; j += 2) {
        const Vec16 first = bits_of(tile, keys, j), second = bits_of(tile, keys, j + 1);
        const uint32_t a[4] = {ones_of_bits(first.x, first.y, lane), ones_of_bits(first.z, first.w, lane),
                               ones_of_bits(second.x, second.y, lane), ones_of_bits(second.z, second.w, lane)};
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

// Stores dq and dw. U is 0 for a token without keys.
__device__ __forceinline__ void write_gradients(const IndexerLossParams& p, const Token& token,
                                                const HeadGradients& u) {
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
