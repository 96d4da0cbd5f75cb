// Of few_heads_sm90: S^T = K . Q^T, the softmax, and O^T += V^T . P^T.
#pragma once
#include "attention/few_heads_sm90/producer.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma_sync.cuh"

// --- products -------------------------------------------------------------------------------------------------

// B operands of a step of k, from lines of 128 bytes, one a head: two fragments for every 8 heads. `place` is this
// lane's address in the first step.
constexpr int HEAD_TILES = HEADS / 8;
struct HeadFragments {
    uint32_t b[HEAD_TILES][2];
};
__device__ __forceinline__ uint32_t head_fragments_place(uint32_t lines, int lane) {
    const int line = lane % 8 + (HEADS > 8 ? lane / 16 * 8 : 0), chunk = lane / 8 % 2;
    return swizzled(lines, line, chunk);
}
__device__ __forceinline__ HeadFragments load_head_fragments(uint32_t place, int step) {
    HeadFragments f;
#pragma unroll
    for (int j = 0; j < HEAD_TILES; j += 2) {
        uint32_t four[4];
        ldmatrix_x4(four, (place ^ (step << 5)) + j * 1024);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (j + i / 2 < HEAD_TILES) f.b[j + i / 2][i % 2] = four[i];
        }
    }
    return f;
}

// acc += A . B^T over 16 of k, all heads.
__device__ __forceinline__ void multiply(float (&acc)[HEAD_TILES][4], const uint32_t (&a)[4], const HeadFragments& f) {
#pragma unroll
    for (int j = 0; j < HEAD_TILES; ++j) mma_m16n8k16(acc[j], a, f.b[j][0], f.b[j][1]);
}

// acc += 16 rows times a column block of Q. Q's fragments are read a step ahead; `f` are those of the first step.
__device__ __forceinline__ void multiply_block(uint32_t q_place, HeadFragments f, const uint32_t (&a)[4][4],
                                               float (&acc)[HEAD_TILES][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        HeadFragments next;
        if (step < 3) next = load_head_fragments(q_place, step + 1);
        multiply(acc, a[step], f);
        if (step < 3) f = next;
    }
}

__device__ __forceinline__ void clear(float (&acc)[HEAD_TILES][4]) {
#pragma unroll
    for (int i = 0; i < HEADS / 2; ++i) acc[i / 4][i % 4] = 0.0f;
}

// S^T of a warp's 16 rows. SUMS sums run beside one another. Loops stay loops: a batch of one pays for every instruction
// fetched.
__device__ __forceinline__ void multiply_qk(const Role& r, uint32_t row, float (&s)[HEAD_TILES][4]) {
    constexpr int SUMS = HEADS == 32 ? 1 : 2, BLOCK_BYTES = 128;
    const uint32_t q = head_fragments_place(q_lines(), r.lane);
    const uint32_t q_rope = q + NOPE_BLOCKS * Q_BLOCK_BYTES;
    uint32_t a[4][4];
    QkRaw rope;
    HeadFragments f;
    if constexpr (D_ROPE > 0) {
        rope = load_qk(row, ROPE_OFFSET, r.t);
        f = load_head_fragments(q_rope, 0);
    }
    QkRaw raw = load_qk(row, 0, r.t);  // always a column block ahead
    clear(s);
    if constexpr (D_ROPE > 0) {
        arrange_qk(rope, a);
        multiply_block(q_rope, f, a, s);
    }
#pragma unroll 1
    for (int first = 0; first < NOPE_BLOCKS; first += SUMS) {
        float sum[SUMS][HEAD_TILES][4];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) clear(sum[i]);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            const int block = first + i;
            if (NOPE_BLOCKS % SUMS != 0 && block >= NOPE_BLOCKS) break;
            f = load_head_fragments(q + block * Q_BLOCK_BYTES, 0);
            arrange_qk(raw, a);
            raw = load_qk(row, min(block + 1, NOPE_BLOCKS - 1) * BLOCK_BYTES, r.t);
            multiply_block(q + block * Q_BLOCK_BYTES, f, a, sum[i]);
        }
#pragma unroll
        for (int k = 0; k < SUMS; ++k) {
#pragma unroll
            for (int i = 0; i < HEADS / 2; ++i) s[i / 4][i % 4] += sum[k][i / 4][i % 4];
        }
    }
}

// O^T += V^T . P^T, and release of the tile, whose two stages of each quarter stand at `place` in the rings.
__device__ __forceinline__ void multiply_pv(const Role& r, const uint32_t (&place)[2],
                                            float (&o)[V_TILES][HEAD_TILES][4]) {
    const uint32_t p = head_fragments_place(p_lines(r), r.lane);
    const uint32_t ring = shared_address(shared) + RING_AT;
    StagedRows rows = {{ring + place[0] * STAGE_BYTES, ring + place[1] * STAGE_BYTES}};
    uint32_t empty = shared_address(small().empty[0]) + 8 * (r.lane == 0 ? place[0] : place[1]);
#pragma unroll 1
    for (int quarter = 0; quarter < 4; ++quarter) {
        const HeadFragments f = load_head_fragments(p, quarter);
        const StagedRows here = rows;
        if (quarter < 3) rows = {{rows.stage[0] + RING_BYTES, rows.stage[1] + RING_BYTES}};
        for_pv_fragments(here, r.warp, r.g, r.t, [&](int q, const uint32_t (&a)[2][4]) {
            multiply(o[2 * q], a[0], f);
            multiply(o[2 * q + 1], a[1], f);
        });
        release_reads();
        mbarrier_arrive_for_warp_at_two(empty, r.lane);
        empty += 8 * STAGES;
    }
}

// --- softmax --------------------------------------------------------------------------------------------------

// The softmax of a thread's heads.
using Softmax = HeadsSoftmax<OWN_HEADS>;

// The element of row (S^T) or column (O^T) i of a thread's two and its c-th head.
template <typename T>
__device__ __forceinline__ T& at(T (&acc)[HEAD_TILES][4], int i, int c) {
    return acc[c / 2][2 * i + c % 2];
}

// References rise to the tile's maxima; sums and O^T follow. The whole warpgroup calls.
__device__ __forceinline__ void raise_references(const Role& r, const float (&s)[HEAD_TILES][4], Softmax& state,
                                                 float (&o)[V_TILES][HEAD_TILES][4]) {
    Small& sm = small();
    float (&across)[4][HEADS] = sm.across[r.warpgroup][0];
    float (&refs)[HEADS] = sm.ref[r.warpgroup], (&rise)[HEADS] = sm.rise[r.warpgroup];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float top = rows_max(fmaxf(at(s, 0, c), at(s, 1, c)));
        if (r.g == 0) across[r.warp][r.head(c)] = top;
    }
    sync_warpgroup(r);
    const int head = threadIdx.x % WARPGROUP;
    if (head < HEADS) {
        const float from = refs[head], low = fmaxf(across[0][head], across[1][head]);
        const float to = fmaxf(fmaxf(from, low), fmaxf(across[2][head], across[3][head]));
        refs[head] = to;
        rise[head] = rescale_factor(from, to);
    }
    sync_warpgroup(r);
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        const int head = 8 * j + 2 * r.t;
        const float2 ref = *reinterpret_cast<const float2*>(&refs[head]);
        const float2 f = *reinterpret_cast<const float2*>(&rise[head]);
        state.ref[2 * j] = ref.x;
        state.ref[2 * j + 1] = ref.y;
        state.sum[2 * j] *= f.x;
        state.sum[2 * j + 1] *= f.y;
#pragma unroll
        for (int v = 0; v < V_TILES; ++v) {
            o[v][j][0] *= f.x;
            o[v][j][1] *= f.y;
            o[v][j][2] *= f.x;
            o[v][j][3] *= f.y;
        }
    }
    sync_warpgroup(r);
}

// P^T of the logits `s` to shared memory, and the sums of a thread's rows. Line = head, chunk = eight rows. True where
// a reference is too low for a value.
__device__ __forceinline__ bool store_p(const Role& r, const float (&s)[HEAD_TILES][4], const Softmax& state,
                                        float (&sums)[OWN_HEADS]) {
    bool high = false;
    float e[HEAD_TILES][4];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float x = at(s, 0, c), y = at(s, 1, c), base = state.ref[c] == -INF ? 0.0f : state.ref[c];
        high |= fmaxf(x, y) > state.ref[c] + REF_SLACK;
        at(e, 0, c) = exp2_approx(x - base);
        at(e, 1, c) = exp2_approx(y - base);
        sums[c] = at(e, 0, c) + at(e, 1, c);
    }
    const int line = r.lane % 8 + (HEADS > 8 ? r.lane / 16 * 8 : 0), chunk = 2 * r.warp + r.lane / 8 % 2;
    const uint32_t to = swizzled(p_lines(r), line, chunk);
    uint32_t rounded[HEADS / 4];
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) rounded[2 * j + i] = pack_bf16x2(e[j][2 * i], e[j][2 * i + 1]);
    }
    if constexpr (HEADS == 8) {
        stmatrix_x2_trans(to, rounded[0], rounded[1]);
    } else {
#pragma unroll
        for (int j = 0; j < HEADS / 8; j += 2)
            stmatrix_x4_trans(to + j * 1024, rounded[2 * j], rounded[2 * j + 1], rounded[2 * j + 2],
                              rounded[2 * j + 3]);
    }
    return high;
}

// S^T to P^T in shared memory; the warpgroup has met when this returns. `first`: its first tile, without references
// yet.
__device__ __forceinline__ void softmax_tile(const Role& r, bool first, const bool (&valid)[2], float scale_log2,
                                             float (&s)[HEAD_TILES][4], Softmax& state,
                                             float (&o)[V_TILES][HEAD_TILES][4]) {
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) at(s, i, c) = valid[i] ? at(s, i, c) * scale_log2 : -INF;
    }
    float sums[OWN_HEADS];
    sync_warpgroup(r);  // the previous tile's P^T has been read
    bool raise = first;
#pragma unroll 1
    while (true) {
        if (__builtin_expect(raise, 0)) raise_references(r, s, state, o);
        const bool high = named_barrier_any(WARPGROUP_SYNC + r.warpgroup, WARPGROUP, store_p(r, s, state, sums));
        if (raise || !high) break;
        raise = true;
    }
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        state.sum[c] += sums[c];
        state.max[c] = fmaxf(state.max[c], fmaxf(at(s, 0, c), at(s, 1, c)));
    }
}
