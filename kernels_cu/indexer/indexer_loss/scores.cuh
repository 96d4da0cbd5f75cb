// How indexer_loss computes the score of each entry of the list, and the bits z > 0.
//
//   a warp   has 32 keys in registers, as A operands, and computes z = K.Q^T for 8 heads at a time
//   a lane   sums w * relu(z) over its heads; the four lanes of a quad add up their sums
//   bits     of 16 keys and 8 heads are four words: bit 4 g + t of word 2 i + k is key 8 i + g, head 2 t + k
#pragma once
#include "indexer/indexer_loss/plan.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/mma_sync.cuh"

// Brings queries, weights and scales to shared memory. Heads that do not exist become zeros.
__device__ __forceinline__ void load_heads(const IndexerLossParams& p, const Token& token) {
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

// Stores the scores of all entries and their bits. Returns the largest score of this thread.
__device__ __forceinline__ float find_scores(const IndexerLossParams& p, const Token& token) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int end = ceil_div(token.count, TILE_KEYS) * TILE_KEYS;
    float largest = -INF;
#pragma unroll 1
    for (int first = KEYS * warp; first < end; first += ROUND) {
        Vec16 keys[4][PIECES];  // [x]: key 8 x + g
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
                uint32_t words[4];  // of bits
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
