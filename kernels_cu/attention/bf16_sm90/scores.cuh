// Part of bf16_sm90: S = Q . K^T of a tile, its softmax, and P for both warpgroups.
#pragma once
#include "attention/bf16_sm90/kinds.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix.cuh"
#include "rows/items.cuh"
#include "tile/softmax.cuh"
#include "tile/warp.cuh"

// Softmax state of a thread's two lines, g and g + 8 of its warp's 16. Accumulators and `sum` are relative to `ref`.
// `sum` and `max` cover only this thread's columns of its own warpgroup's tiles. A logit up to `least` does not raise
// `ref`.
struct Softmax {
    float ref[2] = {-INF, -INF}, sum[2] = {0.0f, 0.0f}, max[2] = {-INF, -INF}, least[2] = {-INF, -INF};
};

// Every KEPT_Q_PERIOD-th step of k has its part of Q in registers, so that only K is read from shared memory there:
// steps KEPT_Q_PERIOD - 1, 2 KEPT_Q_PERIOD - 1, ..., KEPT_Q_STEPS of them.
constexpr int KEPT_Q_PERIOD = 4;

template <int N>
__device__ __forceinline__ void keep_q(int warp, int lane, uint32_t (&kept)[N][4]) {
    const int line = 16 * warp + lane % 16;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int step = KEPT_Q_PERIOD * n + KEPT_Q_PERIOD - 1, chunk = step % 4 * 2 + lane / 16;
        ldmatrix_x4(kept[n], swizzled(shared_address(shared) + Q_AT + step / 4 * BLOCK_BYTES, line, chunk));
    }
}

// Starts S = Q . K^T of a whole tile, region by region in the order in which they are copied. With VOTED the caller
// has waited for the first region.
template <typename K, int N>
__device__ __forceinline__ void start_qk(int tile, uint32_t parity, const uint32_t (&kept)[N][4], float (&s)[32]) {
    const uint64_t q = wgmma_operand(shared_address(shared) + Q_AT, 1024, 16);
    const uint64_t k = wgmma_operand(tile_address(tile), 1024, 16);
    auto multiply = [&](int block, bool first) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint64_t a = wgmma_further(q, block * BLOCK_BYTES + 32 * i);
            const uint64_t b = wgmma_further(k, block * BLOCK_BYTES + 32 * i);
            const int step = 4 * block + i;
            if (first && i == 0) {
                wgmma<ITEMS, Sum::SET, Major::K, Major::K>(s, a, b);
            } else if (step % KEPT_Q_PERIOD == KEPT_Q_PERIOD - 1 && step / KEPT_Q_PERIOD < N) {
                wgmma<ITEMS, Sum::ADD, Major::K>(s, kept[step / KEPT_Q_PERIOD], b);
            } else {
                wgmma<ITEMS, Sum::ADD, Major::K, Major::K>(s, a, b);
            }
        }
    };
#pragma unroll
    for (int region = 0; region < 2; ++region) {
        if (K::SKIPS != Skips::VOTED || region > 0)
            mbarrier_wait(shared_address(&small<K>().full[tile][region]), parity);
        fence_proxy_async();
        wgmma_fence();
#pragma unroll
        for (int block = 0; block < 4; ++block) multiply(4 * region + block, region + block == 0);
        if (has_rope(tile, region)) multiply(8, false);
        if (K::EXCLUDES && has_validity<K>(tile, region)) K::exclude(tile, s);
    }
    wgmma_commit();
}

// Chooses the reference for this warpgroup's tile of pair `pair`, whose largest logits are `top`; bf16_sm90.cuh says
// when it rises. Returns whether it rises for one of the warp's lines. Mostly only the vote runs.
__device__ __forceinline__ bool choose_reference(Softmax& state, const float (&top)[2], int pair, int pairs,
                                                 float (&ref)[2]) {
    ref[0] = state.ref[0];
    ref[1] = state.ref[1];
    if (!__any_sync(~0u, top[0] > state.least[0] || top[1] > state.least[1])) return false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float highest = quad_max(top[row]);
        const float expected = quad_sum(state.sum[row]) * (float(opaque(pairs)) * reciprocal_approx(float(pair)));
        const float slack = pair == 0 ? REF_BELOW : fmaxf(fminf(log2_approx(PEAK * expected), REF_SLACK), REF_BELOW);
        state.least[row] = ref[row] + slack;
        if (highest > state.least[row]) ref[row] = highest - REF_BELOW;
    }
    return __any_sync(~0u, ref[0] != state.ref[0] || ref[1] != state.ref[1]);
}

// Turns S into P relative to `ref`, rounded, as A operands of four steps of k. `sum`: of P before rounding. Returns
// whether a reference of the warp rises.
template <typename K>
__device__ __forceinline__ bool softmax_tile(const typename K::Params& p, const typename K::Columns& columns, int pair,
                                             int pairs, float (&s)[32], Softmax& state, float (&ref)[2],
                                             float (&sum)[2], uint32_t (&prob)[4][4]) {
    const float scale = K::mask_tile(p, columns, s);
    float top[2] = {-INF, -INF};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int n = 0; n < 8; ++n) top[row] = fmaxf(top[row], fmaxf(s[4 * n + 2 * row], s[4 * n + 2 * row + 1]));
        top[row] = K::top_of(top[row], scale);
        state.max[row] = fmaxf(state.max[row], top[row]);
    }
    const bool rises = choose_reference(state, top, pair, pairs, ref);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float base = finite_reference(ref[row]);
        sum[row] = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float &x = s[4 * n + 2 * row], &y = s[4 * n + 2 * row + 1];
            x = exp2_approx(x * scale - base);
            y = exp2_approx(y * scale - base);
        }
        K::count_twice(columns, row, s);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const float x = s[4 * n + 2 * row], y = s[4 * n + 2 * row + 1];
            sum[row] += x + y;
            prob[n / 2][n % 2 * 2 + row] = pack_items(x, y);
        }
    }
    return rises;
}

// Publishes P and its reference for the other warpgroup.
template <typename K>
__device__ __forceinline__ void publish_p(int tile, int warp, int lane, const uint32_t (&prob)[4][4],
                                          const float (&ref)[2]) {
    const int g = lane / 4, t = lane % 4, row = 16 * warp + g;
    const uint32_t first = swizzled(p_address(tile), 16 * warp + lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < 4; ++k) stmatrix_x4(first ^ 32 * k, prob[k][0], prob[k][1], prob[k][2], prob[k][3]);
    if (t == 0) {
        small<K>().ref[tile][row] = ref[0];
        small<K>().ref[tile][row + 8] = ref[1];
    }
    fence_proxy_async();
    named_barrier_arrive(P_READY + tile, CONSUMERS);
}

// Waits for the other warpgroup's P and its reference.
template <typename K>
__device__ __forceinline__ void wait_for_p(int tile, int warp, int lane, float (&ref)[2]) {
    named_barrier_sync(P_READY + tile, CONSUMERS);
    const int row = 16 * warp + lane / 4;
    ref[0] = small<K>().ref[tile][row];
    ref[1] = small<K>().ref[tile][row + 8];
}
