// How logits_sm90 multiplies keys x (queries x heads) of a unit, and sums over heads.
#pragma once
#include "indexer/logits_sm90/queries.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/wgmma.cuh"

// MXFP4: 2 relu(x) is x + |x|, an addition. A maximum would run where the integer instructions do, of which widening
// keys takes many. The weights are halved for it.
__device__ __forceinline__ float relu_or_twice(float x) { return MXFP4 ? x + fabsf(x) : max_or_nan(x, 0.0f); }
__device__ __forceinline__ float weight_or_half(float w) { return MXFP4 ? 0.5f * w : w; }

// The weights of a lane's columns.
struct Weights {
    float of[ROWS / 8][2];

    __device__ __forceinline__ void load(uint32_t weights, int lane) {
#pragma unroll
        for (int i = 0; i < ROWS / 8; ++i) {
            const Vec8 two = load_shared_8(weights + 4 * (8 * i + 2 * (lane % 4)));
            of[i][0] = weight_or_half(__uint_as_float(two.x));
            of[i][1] = weight_or_half(__uint_as_float(two.y));
        }
    }
};

// Starts c = keys x (queries x heads). wgmma_wait<0>() waits for it.
__device__ __forceinline__ void multiply(float (&c)[ROWS / 2], uint64_t keys, uint64_t queries) {
    wgmma_fence();
    wgmma_bytes<E5M2_KEYS, Sum::SET>(c, keys, queries);
#pragma unroll
    for (int step = 1; step < 4; ++step)
        wgmma_bytes<E5M2_KEYS, Sum::ADD>(c, wgmma_further(keys, 32 * step), wgmma_further(queries, 32 * step));
    wgmma_commit();
}

// MXFP4: the keys of a unit as A operands of e5m2, from their codes in a stage. A lane has group t of two keys. What
// follows from these keys' scales is computed for both at once, in the halves of a word.
struct WidenedKeys {
    uint32_t a[4][4];
    float scale;  // of the key that the lane stores

    __device__ __forceinline__ void load(int stage, int warp, int lane, int t) {
        const Small& sm = small();
        Vec16 codes[2];
        uint32_t scales[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 16 * warp + lane / 4 + 8 * i;
            codes[i] = load_shared_16(stage_rows(stage) + row * KEY_BYTES + 16 * t);
            scales[i] = load_shared_4(shared_address(&sm.scales[stage][row]));
        }
        const uint32_t largest = largest_of_both(scales);
        const uint32_t own = __byte_perm(scales[0], scales[1], 0x0400 + 0x0101 * t) & 0x00ff00ff;
        const uint32_t below = largest - own, below_of[2] = {below & 0xffff, below >> 16};
        Magnitudes of[2] = {normal_magnitudes_of(below_of[0]), normal_magnitudes_of(below_of[1])};
        // Rare: a half is more than MOST_BELOW_NORMAL. Then the sum has the half's highest bit.
        constexpr uint32_t TO_HIGHEST_BIT = (0x7fff - MOST_BELOW_NORMAL) * 0x00010001;
        if (__builtin_expect((below + TO_HIGHEST_BIT & 0x80008000) != 0, false))
            of[0] = magnitudes_of(below_of[0]), of[1] = magnitudes_of(below_of[1]);
        scale = factor_of_scales(t % 2 ? largest >> 16 : largest & 0xffff);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const Vec8 values = widen_e2m1_8(words[step], of[i]);
                a[step][i] = values.x;
                a[step][2 + i] = values.y;
            }
        }
    }

  private:
    // The largest scale of each key.
    __device__ __forceinline__ static uint32_t largest_of_both(const uint32_t (&scales)[2]) {
        const auto of_two = [](uint32_t s) { return max_u16x2(s & 0x00ff00ff, __byte_perm(s, 0, 0x4341)); };
        const uint32_t first = of_two(scales[0]), second = of_two(scales[1]);  // of groups 0 and 1, 2 and 3
        return max_u16x2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
    }
};

__device__ __forceinline__ void multiply(float (&c)[ROWS / 2], const WidenedKeys& keys, uint64_t queries) {
    wgmma_fence();
    wgmma_e5m2<Sum::SET>(c, keys.a[0], queries);
#pragma unroll
    for (int step = 1; step < 4; ++step) wgmma_e5m2<Sum::ADD>(c, keys.a[step], wgmma_further(queries, 32 * step));
    wgmma_commit();
}

// A lane's sums over its heads, for each pair of queries: of one query for keys g and g + 8, then of the other one.
// Where queries are interleaved (QueryHead), lane t has query t / 2 of the pair in the even eights, and the other one
// in the odd eights. An odd last query stands for both of its pair. A query's heads are summed in the same order in
// any case.
constexpr int PAIRS = ceil_div(QUERIES, 2);
using Sums = float[PAIRS][4];

__device__ __forceinline__ void sum_heads(const float (&c)[ROWS / 2], const Weights& w, Sums& sums) {
    float of_key[QUERIES][2] = {};
#pragma unroll
    for (int i = 0; i < ROWS / 8; ++i) {
        const int q = INTERLEAVED == 2 ? i / (HEADS / 4) * 2 + i % 2 : i / (HEADS / 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float& sum = of_key[q][j / 2];
            sum = fmaf(relu_or_twice(c[4 * i + j]), w.of[i][j % 2], sum);
        }
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const auto &even = of_key[2 * i], &odd = of_key[min(2 * i + 1, QUERIES - 1)];
        sums[i][0] = even[0], sums[i][1] = even[1], sums[i][2] = odd[0], sums[i][3] = odd[1];
    }
}

// The sum of a pair that lane t stores, from what the quad's lanes have.
__device__ __forceinline__ float sum_of_lane(const float (&sums)[4], int t) {
    if constexpr (INTERLEAVED == 1) return quad_sum_of_mine(sums, t);
    const float first = sums[0] + __shfl_xor_sync(~0u, sums[2], 2),
                second = sums[1] + __shfl_xor_sync(~0u, sums[3], 2);
    const bool odd = t % 2 != 0;
    return (odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, 1);
}
