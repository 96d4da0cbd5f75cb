// Part of fp8_short_sm90: the epilogue: denominators and output.
#pragma once
#include "attention/division/results.cuh"
#include "attention/fp8_short_sm90/scores.cuh"
#include "attention/fp8_short_sm90/values.cuh"

// Loads the sinks of a CTA's heads to shared memory, -inf where there is none.
__device__ __forceinline__ void load_sinks(const AttentionParams& p, int first_head) {
    const int head = first_head + int(threadIdx.x);
    if (threadIdx.x < HEADS)
        rest().sink[threadIdx.x] = p.sink == nullptr || head >= p.h_q ? -INF : p.sink[head] * LOG2E;
}

// A head's denominator, the sum over all warps.
__device__ __forceinline__ float sum_of_warps(int local) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += rest().across[i][local];
    return sum;
}

// Turns denominators into statistics and into the factors of O^T.
__device__ __forceinline__ void finish_heads(const AttentionParams& p, const Item& item) {
    const int local = threadIdx.x, head = item.first_head + local;
    if (local >= HEADS || head >= p.h_q) return;
    const float sum = sum_of_warps(local);
    const HeadResult result = {0.0f, log2_sum_exp(rest().ref[local], sum)};
    write_statistics(p, item.query, head, result);
    rest().scale[local] = sum == 0.0f ? 0.0f : 1.0f / (sum * (1.0f + exp2_approx(rest().sink[local] - result.lse)));
}

// The output goes through the space of Q and P, as bf16 [head][column], so that whole lines of memory are written.
// Groups of 32 bytes are swizzled from one pair of heads to the next, so that a warp's stores hit all banks.
constexpr int RESULT_BYTES = 2 * D_V;  // of a head
static_assert(HEADS * RESULT_BYTES <= ROWS_AT, "");

// Stores O^T times `scale` to shared memory.
__device__ __forceinline__ void stage_results(const Role& r, const Output2& out) {
    const uint32_t to =
        shared_address(shared) + 2 * r.t * RESULT_BYTES + 256 * r.warpgroup + (32 * r.warp + 4 * r.g ^ r.t << 5);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float f = rest().scale[r.head(c)];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
            store_shared_4(to + (c / 2 * 8 + c % 2) * RESULT_BYTES + 128 * v,
                           pack_bf16x2(f * out.o[v][element(0, c)], f * out.o[v][element(1, c)]));
        }
    }
}

constexpr int AT_ONCE = WARPS / 2;  // heads that are written at a time: two warps write a head

// Writes the output, after a CTA barrier. A thread writes eight columns of every AT_ONCE-th head.
__device__ __forceinline__ void write_results(const AttentionParams& p, const Item& item, const Role& r) {
    const int first = (4 * r.warpgroup + r.warp) / 2, chunk = r.warp % 2 * 32 + r.lane;
    const uint32_t from = shared_address(shared) + first * RESULT_BYTES + (16 * chunk ^ first / 2 % 4 << 5);
    bf16* to = out_of(p, item.query, item.first_head + first, CHUNK * chunk);
    const int heads = min(HEADS, p.h_q - item.first_head) - first;
    const auto staged = [&](int i) { return load_shared_16(from + i * RESULT_BYTES); };
    if (p.flags & WIDE_OUT) {
#pragma unroll
        for (int i = 0; i < HEADS; i += AT_ONCE) {
            if (i < heads) store_16(to + i * p.out_h, staged(i));
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < heads; i += AT_ONCE) store_chunk(to + i * p.out_h, staged(i), false);
    }
}
