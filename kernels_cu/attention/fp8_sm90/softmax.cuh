// Part of fp8_sm90: the softmax of a tile. S^T becomes P^T; references rise where needed; scale / r is stored for the
// values.
#pragma once
#include "attention/fp8_sm90/scores.cuh"
#include "ptx/matrix.cuh"

// One step of a butterfly reduction over lanes `distance` apart: of 2 HALF values each lane keeps HALF, combined with
// the other lane's.
template <int HALF, typename Combine>
__device__ __forceinline__ void exchange_halves(float (&v)[OWN_HEADS], bool high, int distance, Combine combine) {
#pragma unroll
    for (int c = 0; c < HALF; ++c) {
        const float first = v[c], second = v[c + HALF];
        v[c] = combine(high ? second : first, __shfl_xor_sync(~0u, high ? first : second, distance));
    }
}

// Combines the values of lanes with the same t, until each thread has SUMS of them: those of heads sum_head(r, 0), ...
template <typename Combine>
__device__ __forceinline__ void combine_lanes(const Role& r, float (&v)[OWN_HEADS], Combine combine) {
    if constexpr (SUMS < OWN_HEADS) {
        exchange_halves<OWN_HEADS / 2>(v, r.g & 4, 16, combine);
        exchange_halves<OWN_HEADS / 4>(v, r.g & 2, 8, combine);
        exchange_halves<OWN_HEADS / 8>(v, r.g & 1, 4, combine);
    }
}
__device__ __forceinline__ void add_lanes(const Role& r, float (&v)[OWN_HEADS]) {
    combine_lanes(r, v, [](float x, float y) { return x + y; });
}
__device__ __forceinline__ int sum_head(const Role& r, int c) {
    return SUMS == OWN_HEADS ? r.head(c) : 2 * r.lane + c;
}

// The largest logit + log2 r of a thread's two rows, for each of its heads.
__device__ __forceinline__ void find_tops(const RowScales& scales, const float (&s)[HEADS / 2],
                                          float (&tops)[OWN_HEADS]) {
    const float log2_r[2] = {log2_approx(scales.r[0]), log2_approx(scales.r[1])};  // exact: r is a power of two
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c)
        tops[c] =
            fmaxf(s[element(0, c)] * scales.logit[0] + log2_r[0], s[element(1, c)] * scales.logit[1] + log2_r[1]);
}

// Rare: raises references to the tile's largest logit + log2 r, minus HEADROOM. O^T and the sums so far must then be
// multiplied by `factor`.
__device__ __forceinline__ void raise_references(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2]) {
    Small& sm = small();
    float tops[OWN_HEADS];
    find_tops(scales, s, tops);
    combine_lanes(r, tops, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
    for (int c = 0; c < SUMS; ++c) {
        const float top = SUMS == OWN_HEADS ? rows_max(tops[c]) : tops[c];
        if (SUMS < OWN_HEADS || r.g == 0) sm.across[r.warpgroup][r.warp][sum_head(r, c)] = top;
    }
    sync_warpgroup(r);
    const int head = threadIdx.x % WARPGROUP;
    if (head < HEADS) {
        const float (&of_warps)[4][HEADS] = sm.across[r.warpgroup];
        const float old = sm.ref[head];
        const float top =
            fmaxf(fmaxf(of_warps[0][head], of_warps[1][head]), fmaxf(of_warps[2][head], of_warps[3][head]));
        const float to = fmaxf(old, top - HEADROOM);
        sm.ref[head] = to;
        sm.factor[r.warpgroup][head] = exp2_approx(old - to);
    }
    sync_warpgroup(r);
}

// Stores scale / r of a tile's rows to `to` for load_columns, which wants the four rows of a thread side by side. Each
// quad stores the ratios of its rows.
__device__ __forceinline__ void store_ratios(const Role& r, const RowScales& scales, uint16_t (*to)[TILE_ROWS]) {
    const int place = 16 * r.warp + r.g / 2 * 4 + r.g % 2;  // of row g; row g + 8 is two places further
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int k = 0; k < RATIO_WORDS; ++k) {
            if (CHUNKS % 4 == 0 || k < CHUNKS / 4 || r.t < CHUNKS % 4)
                to[chunk_of_word(r.t, k)][place + 2 * i] = uint16_t(scales.ratio[k] >> 16 * i);
        }
    }
}

// P^T = r 2^(logit - ref) of row g + 8 i and the thread's heads 2 j and 2 j + 1, as a pair of f16. Adds P^T / r to
// `sums`.
__device__ __forceinline__ uint32_t round_p(const RowScales& scales, const float (&s)[HEADS / 2], const float2& ref,
                                            int j, int i, float (&sums)[OWN_HEADS]) {
    const float x = exp2_approx(fmaf(s[4 * j + 2 * i], scales.logit[i], -ref.x));
    const float y = exp2_approx(fmaf(s[4 * j + 2 * i + 1], scales.logit[i], -ref.y));
    sums[2 * j] = i == 0 ? x : sums[2 * j] + x;
    sums[2 * j + 1] = i == 0 ? y : sums[2 * j + 1] + y;
    return pack_f16x2(x * scales.r[i], y * scales.r[i]);
}

// Stores P^T to shared memory as f16. `sums` gets the sums of P^T / r over this thread's rows. Returns true if a value
// is above MAX_P.
__device__ __forceinline__ bool store_p(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2],
                                        float (&sums)[OWN_HEADS]) {
    // In P a line is a head, a chunk is eight rows.
    const int line = r.lane % 8 + r.lane / 16 * 8, chunk = 2 * r.warp + r.lane / 8 % 2;
    const uint32_t to = swizzled(shared_address(shared) + P_AT + r.warpgroup * HEADS_BLOCK_BYTES, line, chunk);
    float2 refs[HEADS / 8];  // all loaded first, or each load would wait for the stores before it
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) refs[j] = *reinterpret_cast<const float2*>(&small().ref[r.head(2 * j)]);
    uint32_t top = 0, rounded[2][2];
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        const float2 ref = refs[j];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rounded[j % 2][i] = round_p(scales, s, ref, j, i, sums);
            top = max_f16x2(top, rounded[j % 2][i]);
        }
        if (j % 2 == 1)
            stmatrix_x4_trans(to + (j - 1) * 1024, rounded[0][0], rounded[0][1], rounded[1][0], rounded[1][1]);
    }
    return larger_half(top) > MAX_P;
}

// S^T of this warpgroup's tile becomes P^T, which is published. `sums` gets what this thread's rows add to the
// denominators. P^T is computed with the references as they are; only before the `first` tile of a split they are set.
// Rarely a P^T is too large. Then references rise, P^T is computed again, and the function returns true.
__device__ __forceinline__ bool softmax_tile(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2],
                                             float (&sums)[OWN_HEADS], bool first) {
    if (!PLAIN) store_ratios(r, scales, small().ratio[r.warpgroup]);
    if (first) raise_references(rare_role(r), scales, s);
    const bool too_large = store_p(r, scales, s, sums);
    fence_proxy_async();
    const bool raised = named_barrier_any(WARPGROUP_SYNC + r.warpgroup, WARPGROUP, too_large);
    if (raised) {
        raise_references(rare_role(r), scales, s);
        store_p(r, scales, s, sums);
        fence_proxy_async();
    }
    if (threadIdx.x % WARPGROUP == 0) small().raised[r.warpgroup] = raised;
    if (raised) sync_warpgroup(r);
    named_barrier_arrive(P_READY + r.warpgroup, CONSUMERS);
    return raised;
}
