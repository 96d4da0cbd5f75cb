// Part of fp8_short_sm90: S^T and P^T of a tile.
#pragma once
#include "attention/fp8_short_sm90/rows.cuh"

// Combines `values` of a thread's heads over the rows of its warp, and writes the results to `across`.
template <typename Combine, typename OverRows>
__device__ __forceinline__ void write_across(const Role& r, float (&values)[OWN_HEADS], Combine combine,
                                             OverRows over_rows) {
    combine_lanes(r, values, combine);
#pragma unroll
    for (int c = 0; c < SUMS; ++c) {
        const float value = SUMS == OWN_HEADS ? over_rows(values[c]) : values[c];
        if (SUMS < OWN_HEADS || r.g == 0) rest().across[4 * r.warpgroup + r.warp][sum_head(r, c)] = value;
    }
}
// Writes `value` for all heads, where a warp has no rows.
__device__ __forceinline__ void fill_across(const Role& r, float value) {
#pragma unroll
    for (int head = 0; head < HEADS; head += 32) rest().across[4 * r.warpgroup + r.warp][head + r.lane] = value;
}

// Finds the references from the largest logits + log2 r of each warp, in `across`. All threads call; they meet twice.
__device__ __forceinline__ void find_references() {
    sync_cta();
    if (threadIdx.x < HEADS) {
        float top = REF_NONE;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) top = fmaxf(top, rest().across[i][threadIdx.x]);
        rest().ref[threadIdx.x] = fmaxf(top - HEADROOM, REF_NONE);
    }
    sync_cta();
}

// Stores P^T = r 2^(logit - ref) of the tile to shared memory, and the sums of P^T / r to `across`.
__device__ __forceinline__ void store_p_of_tile(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2]) {
    const int line = r.lane % 8 + r.lane / 16 * 8, chunk = 2 * r.warp + r.lane / 8 % 2;
    const uint32_t to = swizzled(shared_address(shared) + r.warpgroup * HEADS_BLOCK_BYTES, line, chunk);
    float sums[OWN_HEADS];
    uint32_t rounded[2][2];
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        const float2 ref = *reinterpret_cast<const float2*>(&rest().ref[r.head(2 * j)]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rounded[j % 2][i] = round_p(scales, s, ref, j, i, sums);
        }
        if (j % 2 == 1)
            stmatrix_x4_trans(to + (j - 1) * 1024, rounded[0][0], rounded[0][1], rounded[1][0], rounded[1][1]);
    }
    write_across(r, sums, [](float x, float y) { return x + y; }, [](float x) { return rows_sum(x); });
}

// Computes S^T and P^T of the warpgroup's tile. All threads call this or skip_tile; they meet three times.
__device__ __forceinline__ void attend_tile(const AttentionParams& p, const Role& r, float logit_scale) {
    float s[HEADS / 2];
    const RowScales scales = multiply_qk_fine_scales(rows_of_warp(r) + r.g * STRIDE, r.t, false, logit_scale, s);
    const uint32_t valid = rest().valid[4 * r.warpgroup + r.warp];
    if (!all_rows_visible(valid)) mask_rows(p, r, 0, valid, logit_scale < 0.0f ? INF : -INF, s);
    store_ratios(r, scales, rest().ratio[r.warpgroup]);
    float tops[OWN_HEADS];
    find_tops(scales, s, tops);
    write_across(r, tops, [](float x, float y) { return fmaxf(x, y); }, [](float x) { return rows_max(x); });
    find_references();
    store_p_of_tile(r, scales, s);
    fence_proxy_async();
    sync_cta();
}

// Does the same for a warpgroup whose tile is not multiplied.
__device__ __forceinline__ void skip_tile(const Role& r) {
    fill_across(r, REF_NONE);
    find_references();
    fill_across(r, 0.0f);
    sync_cta();
}
