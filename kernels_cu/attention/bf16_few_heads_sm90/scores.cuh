// Part of bf16_few_heads_sm90: S^T = K . Q^T of a tile, its softmax, and P^T in shared memory.
#pragma once
#include "attention/bf16_few_heads_sm90/plan.cuh"
#include "ptx/convert.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "tile/softmax.cuh"

// Starts S^T (+)= K . Q^T over column blocks BEGIN to END - 1. SUM: whether the first step sets S^T or adds to it.
template <int BEGIN, int END, Sum SUM>
__device__ __forceinline__ void start_qk(const Role& r, float (&acc)[HEADS / 2]) {
    const uint64_t tile = wgmma_operand(tile_of(r), 1024, 16), q = wgmma_operand(q_lines(r), 1024, 16);
    wgmma_fence();
#pragma unroll
    for (int block = BEGIN; block < END; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint64_t a = wgmma_further(tile, block * BLOCK_BYTES + 32 * i);
            const uint64_t b = wgmma_further(q, block * Q_BLOCK_BYTES + 32 * i);
            if (SUM == Sum::SET && block == BEGIN && i == 0) {
                wgmma<Values::BF16, Sum::SET, Major::K, Major::K>(acc, a, b);
            } else {
                wgmma<Values::BF16, Sum::ADD, Major::K, Major::K>(acc, a, b);
            }
        }
    }
    wgmma_commit();
}

__device__ __forceinline__ void wait_for_stage(const Role& r, int stage, uint32_t parity) {
    mbarrier_wait(shared_address(&small().full[r.warpgroup * STAGES + stage]), parity);
}

// Waits for a tile that is not multiplied.
__device__ __forceinline__ void wait_for_tile(const Role& r, uint32_t parity) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) wait_for_stage(r, stage, parity);
}

// Waits for stage N of a tile, and starts what it adds to S^T.
template <int N>
__device__ __forceinline__ void start_qk_stage(const Role& r, uint32_t parity, float (&s)[HEADS / 2]) {
    wait_for_stage(r, N, parity);
    fence_proxy_async();
    start_qk<2 * N, N == STAGES - 1 ? BLOCKS : 2 * N + 2, N == 0 ? Sum::SET : Sum::ADD>(r, s);
}

// S^T of a tile whose stages are still being copied.
__device__ __forceinline__ void multiply_qk_by_stages(const Role& r, uint32_t parity, float (&s)[HEADS / 2]) {
    start_qk_stage<0>(r, parity, s);
    start_qk_stage<1>(r, parity, s);
    start_qk_stage<2>(r, parity, s);
    start_qk_stage<3>(r, parity, s);
    wgmma_wait<0>();
}

// --- softmax --------------------------------------------------------------------------------------------------

using Softmax = HeadsSoftmax<OWN_HEADS>;

// Raises references to the tile's maxima; rescales sums and O^T. The whole warpgroup calls.
__device__ __forceinline__ void raise_references(const Role& r, const float (&s)[HEADS / 2], Softmax& state,
                                                 float (&o)[V_BLOCKS][HEADS / 2]) {
    float (&across)[4][HEADS] = small().across[r.warpgroup][0];
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float top = rows_max(fmaxf(s[element(0, c)], s[element(1, c)]));
        if (r.g == 0) across[r.warp][r.head(c)] = top;
    }
    sync_warpgroup(r);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const int head = r.head(c);
        const float top = fmaxf(fmaxf(across[0][head], across[1][head]), fmaxf(across[2][head], across[3][head]));
        const float to = fmaxf(state.ref[c], top), f = rescale_factor(state.ref[c], to);
        state.ref[c] = to;
        state.sum[c] *= f;
#pragma unroll
        for (int v = 0; v < V_BLOCKS; ++v) {
            o[v][element(0, c)] *= f;
            o[v][element(1, c)] *= f;
        }
    }
}

// Turns S^T into P^T, before rounding.
__device__ __forceinline__ void softmax_tile(const AttentionParams& p, const Role& r, const bool (&valid)[2],
                                             float (&s)[HEADS / 2], Softmax& state, float (&o)[V_BLOCKS][HEADS / 2]) {
    bool high = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int c = 0; c < OWN_HEADS; ++c) {
            float& x = s[element(i, c)];
            x = valid[i] ? x * p.scale_log2 : -INF;
            high |= x > state.ref[c] + REF_SLACK;
            state.max[c] = fmaxf(state.max[c], x);
        }
    }
    // The vote is also a barrier: all warps have read the tile's RoPE columns, over which P^T is stored.
    if (any(WARPGROUP_SYNC + r.warpgroup, high)) raise_references(r, s, state, o);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float base = finite_reference(state.ref[c]);
        float &x = s[element(0, c)], &y = s[element(1, c)];
        x = exp2_approx(x - base);
        y = exp2_approx(y - base);
        state.sum[c] += x + y;
    }
}

// Stores P^T to shared memory, rounded: a line for each head, a chunk for eight rows.
__device__ __forceinline__ void store_p(const Role& r, const float (&s)[HEADS / 2]) {
    const int line = r.lane % 8 + (HEADS > 8 ? r.lane / 16 * 8 : 0), chunk = 2 * r.warp + r.lane / 8 % 2;
    const uint32_t to = swizzled(tile_of(r) + V_BLOCKS * BLOCK_BYTES, line, chunk);
    auto rounded = [&](int j, int i) { return pack_bf16x2(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]); };
    if constexpr (HEADS == 8) {
        stmatrix_x2_trans(to, rounded(0, 0), rounded(0, 1));
    } else {
#pragma unroll
        for (int j = 0; j < HEADS / 8; j += 2)
            stmatrix_x4_trans(to + j * 1024, rounded(j, 0), rounded(j, 1), rounded(j + 1, 0), rounded(j + 1, 1));
    }
    fence_proxy_async();
    sync_warpgroup(r);
}
