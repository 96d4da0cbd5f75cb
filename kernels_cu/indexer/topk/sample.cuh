// A sample of a long row's logits, and the cutoff that it tells: a logit that somewhat more than k of the row are
// larger than.
#pragma once
#include "indexer/topk/threshold.cuh"

// The largest logit whose key is less than `key`, at least -inf. `key` is a multiple of 1024: so the result is never
// -0, which compares equal to +0.
__device__ __forceinline__ float logit_below(uint32_t key) {
    const uint32_t bits = max(key, 0x00800002u) - 3;  // the inverse of radix_key_of, one further down
    return __uint_as_float(bits >> 31 ? bits ^ 0x80000000u : ~bits);
}

// A digit of a key that tells logits of usual sizes apart better than the upper 11 bits: mostly one search is enough.
// From 2^-16 to 2^16 each power of two of either sign has 32 digits. Digit NEAR_0 has all logits nearer to 0, digit 0
// and the last one those further away.
constexpr bool HAS_FINE_DIGITS = ORDERED && THREADS > 256;
constexpr int FINE_SHIFT = 18, NEAR_0 = 1023;
constexpr int NEGATIVE_DIGITS = 3616, POSITIVE_DIGITS = 10720;  // subtracted from a key's upper bits
__device__ __forceinline__ uint32_t fine_digit(uint32_t key) {
    const int upper = key >> FINE_SHIFT;
    return max(min(max(upper - NEGATIVE_DIGITS, 0), NEAR_0), min(upper - POSITIVE_DIGITS, BINS - 1));
}
// The least key of a fine digit.
__device__ __forceinline__ uint32_t least_key_of_fine_digit(int digit) {
    return digit == 0 ? 0 : uint32_t(digit + (digit <= NEAR_0 ? NEGATIVE_DIGITS : POSITIVE_DIGITS)) << FINE_SHIFT;
}

// A thread's logits of a sample: pieces of 32 bytes, at equal distances over the row.
struct Sample {
    static constexpr int SIZE = THREADS * SAMPLE_VECTORS * 4, PIECES = SIZE / 8;  // of all threads
    float4 vector[SAMPLE_VECTORS];

    __device__ __forceinline__ void load(const TopkParams& p, int row, const Range& range) {
        const int64_t start = row * p.logits_stride;
        const int length = range.end - range.begin, base = range.begin / 4 * 4, step = length / PIECES;
#pragma unroll
        for (int v = 0; v < SAMPLE_VECTORS; ++v) {
            const int piece = (v * THREADS + threadIdx.x) / 2;
            vector[v] =
                logits_inside(p, start, base + int(int64_t(piece) * step) / 8 * 8 + threadIdx.x % 2 * 4, range, -INF);
        }
    }
};

// The cutoff for a row with this range. Called by the CTA; all CTAs of a cluster find the same.
//
// Of the row's k largest, the sample has k * SIZE / length on average, give or take the square root of that. So the
// cut goes below the sampled item of number `rank`, which leaves room for six such deviations: the pool rarely gets
// fewer than k. Or halfway between k and what the pool has room for, if that is less. A histogram gives no finer cut
// than below a whole bin. If more than `most` sampled items are above that, the pool might overflow: then the next
// digit.
__device__ __forceinline__ float guess_cutoff(const TopkParams& p, const Range& range, const Sample& sample) {
    constexpr int SIZE = Sample::SIZE;
    const int length = range.end - range.begin;
    uint32_t key[SAMPLE_VECTORS][4];
#pragma unroll
    for (int v = 0; v < SAMPLE_VECTORS; ++v) {
        const float4& x = sample.vector[v];
        const float of_vector[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) key[v][i] = radix_key_of(of_vector[i]);
    }
    const float share = SIZE * reciprocal_approx(length);  // of the row in the sample
    const float expected = p.k * share, room = POOL_CAPACITY * share;
    const int rank = max(1, int(min(expected + 6 * sqrt_approx(expected) + 4, (expected + room) * 0.5f)));
    const int most = max(rank, min(rank + rank / 2, int(room - 5 * sqrt_approx(room))));
    if constexpr (HAS_FINE_DIGITS) {
#pragma unroll
        for (int i = 0; i < 4 * SAMPLE_VECTORS; ++i) atomicAdd(&shared().bins[0][fine_digit(key[i / 4][i % 4])], 1u);
        find_bin_of_cta(shared().bins[0], rank);
        if (shared().above + shared().inside <= most) return logit_below(least_key_of_fine_digit(shared().digit));
    }
#pragma unroll
    for (int i = 0; i < 4 * SAMPLE_VECTORS; ++i) count_digit(shared().bins[0], key[i / 4][i % 4], 0, 32, 21);
    find_bin_of_cta(shared().bins[0], rank);
    const uint32_t digit = shared().digit;
    const int above = shared().above, inside = shared().inside;
    if (above + inside <= most) return logit_below(digit << 21);
#pragma unroll
    for (int i = 0; i < 4 * SAMPLE_VECTORS; ++i) count_digit(shared().bins[0], key[i / 4][i % 4], digit, 21, 10);
    find_bin_of_cta(shared().bins[0], rank - above);
    return logit_below(digit << 21 | shared().digit << 10);
}
