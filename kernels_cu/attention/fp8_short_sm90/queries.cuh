// Part of fp8_short_sm90: Q becomes f16, in the order in which S^T takes its columns.
#pragma once
#include "attention/fp8_short_sm90/plan.cuh"

// This thread's part of Q: of HEADS / 32 heads, eight columns for each t, as store_q takes them
// (fp8_sm90/queries.cuh). The stores of eight lanes hit all banks; four lanes load 64 bytes of a head.
struct QColumns {
    static constexpr int COUNT = HEADS / 32;
    Vec16 of[COUNT][4];

    static __device__ __forceinline__ int head(const Role& r, int i) {
        return 8 * (r.warpgroup + 4 * i) + r.lane / 2 % 4 + r.lane / 16 * 4;
    }
    static __device__ __forceinline__ int half(const Role& r) { return r.lane % 2; }
    static __device__ __forceinline__ int block(const Role& r) { return 2 * r.warp + r.lane / 8 % 2; }

    __device__ __forceinline__ void load(const AttentionParams& p, const Item& item, const Role& r) {
        const bool alone = are_alone(r.warp);
        const int column = 128 * r.warp + (alone ? 64 : 16) * (r.lane / 8 % 2) + 8 * half(r);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int head = item.first_head + QColumns::head(r, i);
            const bf16* from = q_of(p, item.query, head) + column;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                of[i][t] = {0, 0, 0, 0};
                if (head < p.h_q) of[i][t] = *reinterpret_cast<const Vec16*>(from + (alone ? 16 : 32) * t);
            }
        }
    }
    // Stores Q to shared memory as f16. Returns the factor of logits. All threads call; they meet twice.
    __device__ __forceinline__ float store(const AttentionParams& p, const Role& r) const {
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) top = largest_bits(top, of[i]);
        top = __reduce_max_sync(~0u, larger_half(top & 0x7fff7fff));  // positive floats compare as their bits do
        if (r.lane == 0) rest().q_max[4 * r.warpgroup + r.warp] = __uint_as_float(top << 16);
        sync_cta();
        float max = rest().q_max[r.lane % WARPS];
        max = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(max)));
        const int shift = q_shift(max);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            store_q(swizzled(shared_address(shared) + Q_AT, head(r, i), 4 * half(r)), block(r), of[i],
                    power_of_two_bf16x2(shift + 127), true);
        fence_proxy_async();
        sync_cta();
        return logit_scale_of(p, __uint_as_float(uint32_t(127 - shift) << 23));
    }
};
