// A sample of a long row, and what it tells: a logit that somewhat more than k of the row are larger than.
#pragma once
#include "indexer/topk/threshold.cuh"

// The next logit below one of this order, at least -inf. The order is a multiple of 1024: otherwise it might be -0.
__device__ __forceinline__ float logit_below(uint32_t order) {
    const uint32_t bits = max(order, 0x00800002u) - 3;
    return __uint_as_float(bits >> 31 ? bits ^ 0x80000000u : ~bits);
}

// A thread's logits of a sample of a row: pieces of 32 bytes from all over the row.
struct Sample {
    static constexpr int SIZE = THREADS * SAMPLED * 4, PIECES = SIZE / 8;  // of all threads
    float4 vector[SAMPLED];

    __device__ __forceinline__ void load(const TopkParams& p, int row, const Range& range) {
        const int64_t start = row * p.logits_stride;
        const int length = range.end - range.begin, base = range.begin / 4 * 4, step = length / PIECES;
#pragma unroll
        for (int v = 0; v < SAMPLED; ++v) {
            const int piece = (v * THREADS + threadIdx.x) / 2;
            vector[v] =
                logits_inside(p, start, base + int(int64_t(piece) * step) / 8 * 8 + threadIdx.x % 2 * 4, range, -INF);
        }
    }
};

// A logit that somewhat more than k of a row are larger than. Called by the CTA.
__device__ __forceinline__ float guess_threshold(const TopkParams& p, const Range& range, const Sample& sample) {
    constexpr int SIZE = Sample::SIZE;
    const int length = range.end - range.begin;
    uint32_t order[SAMPLED][4];
#pragma unroll
    for (int v = 0; v < SAMPLED; ++v) {
        const float4& x = sample.vector[v];
        const float of_vector[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) order[v][i] = order_of(of_vector[i]);
    }
    const float share = SIZE * reciprocal_approx(length), expected = p.k * share, room = CAPACITY * share;
    const int rank = max(1, int(min(expected + 6 * sqrt_approx(expected) + 4, (expected + room) * 0.5f)));
    const int most = max(rank, min(rank + rank / 2, int(room - 5 * sqrt_approx(room))));  // that the pool has room for
#if ORDERED && THREADS > 256
#pragma unroll
    for (int i = 0; i < 4 * SAMPLED; ++i) atomicAdd(&shared().bins[0][fine_digit(order[i / 4][i % 4])], 1u);
    find_bin_of_cta(shared().bins[0], rank);
    if (shared().above + shared().inside <= most) return logit_below(least_of_fine(shared().digit));
#endif
#pragma unroll
    for (int i = 0; i < 4 * SAMPLED; ++i) count_digit(shared().bins[0], order[i / 4][i % 4], 0, 32, 21);
    find_bin_of_cta(shared().bins[0], rank);
    const uint32_t digit = shared().digit;
    const int above = shared().above, inside = shared().inside;
    if (above + inside <= most) return logit_below(digit << 21);
#pragma unroll
    for (int i = 0; i < 4 * SAMPLED; ++i) count_digit(shared().bins[0], order[i / 4][i % 4], digit, 21, 10);
    find_bin_of_cta(shared().bins[0], rank - above);
    return logit_below(digit << 21 | shared().digit << 10);
}
