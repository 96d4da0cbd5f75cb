// Part of portable: the softmax in the score warps, in base 2. It turns S into P, in shared memory, and computes the
// factors that rescale O to new references.
//
// FOLDED: P is f16. An output warp, whose columns have one scale, multiplies P by the scale later (values.cuh).
#pragma once
#include "attention/portable/scores.cuh"
#include "ptx/arithmetic.cuh"
#include "rows/items.cuh"
#include "tile/softmax.cuh"
#include "tile/warp.cuh"

// Softmax state of a thread's two heads: rows g and g + 8 of its own m tile. `sum` covers this thread's columns only.
struct Softmax {
    float ref[2] = {-INF, -INF}, sum[2] = {0.0f, 0.0f}, max[2] = {-INF, -INF};

    // SUMS_IN_SHARED: sums and maxima are in shared memory between store_sums and load_sums.
    __device__ __forceinline__ void store_sums() const {
        const Role r = Role::here();
        Small& sm = small();
        if (SUMS_IN_SHARED) sm.sums[32 * r.warp + r.lane] = make_float4(sum[0], sum[1], max[0], max[1]);
    }
    __device__ __forceinline__ void load_sums() {
        const Role r = Role::here();
        const Small& sm = small();
        if (SUMS_IN_SHARED) {
            const float4 v = sm.sums[32 * r.warp + r.lane];
            sum[0] = v.x, sum[1] = v.y, max[0] = v.z, max[1] = v.w;
        }
    }
};

// Two values of P in the form of shared memory.
__device__ __forceinline__ uint32_t pack_p(float x, float y) { return FOLDED ? pack_f16x2(x, y) : pack_items(x, y); }

// The softmax of a tile in a score warp.
struct Probabilities {
    OwnScores s;
    float top[2], rescale[2];

    // Scales the logits; sets them to -inf where a row is not valid; finds the largest.
    __device__ __forceinline__ void mask(const AttentionParams& p, int tile) {
        const float scale_log2 = SCALE_OF_CALL ? small().logit_scale : p.scale_log2;
        const uint8_t* valid = small().valid[tile % VALID_TILES];
        const Role r = Role::here();
        const bool masked = !MASK_IF_NEEDED || !__all_sync(~0u, valid[r.lane % TILE_ROWS]);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] *= scale_log2;
        }
        if (masked) {
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) {
                const uint32_t both = *reinterpret_cast<const uint16_t*>(valid + 8 * n + 2 * r.t);
#pragma unroll
                for (int i = 0; i < 4; ++i) s[n][i] = (i % 2 ? both >> 8 : both & 1) ? s[n][i] : -INF;
            }
        }
        mask_unseen(p, tile, s);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            top[i] = -INF;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) top[i] = fmaxf(top[i], fmaxf(s[n][2 * i], s[n][2 * i + 1]));
            top[i] = quad_max(top[i]);
        }
    }

    // Raises references where needed, which is rare. Turns logits into P.
    __device__ __forceinline__ void exponentiate(Softmax& state) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            state.max[i] = fmaxf(state.max[i], top[i]);
            const float ref = top[i] - REF_BELOW > state.ref[i] + REF_SLACK ? top[i] - REF_BELOW : state.ref[i];
            const float base = finite_reference(ref);
            rescale[i] = ref == state.ref[i] ? 1.0f : exp2_approx(state.ref[i] - base);
            state.ref[i] = ref;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) {
                s[n][2 * i] = exp2_approx(s[n][2 * i] - base);
                s[n][2 * i + 1] = exp2_approx(s[n][2 * i + 1] - base);
            }
        }
    }

    // Stores P and the factors of O to shared memory.
    __device__ __forceinline__ void write(int buffer, Softmax& state) const {
        const Role r = Role::here();
        Small& sm = small();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) sum += s[n][2 * i] + s[n][2 * i + 1];
            state.sum[i] = state.sum[i] * rescale[i] + sum;
            if (r.t == 0 && (!ALL_WARPS_GET_SUMS || r.slice() == 0))
                sm.rescale[buffer][r.own_tile() * 16 + r.g + 8 * i] = rescale[i];
        }
        const bool rescaled = __any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f);
        if (r.lane == 0) sm.rescaled[buffer][r.warp] = rescaled;
#pragma unroll
        for (int k = 0; k < K_TILES; ++k) {
            if (ALL_WARPS_GET_SUMS && k % SLICES != r.slice()) continue;
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = pack_p(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]);
            store_shared_16(p_fragment(buffer, r.own_tile(), k, r.lane), {a[0], a[1], a[2], a[3]});
        }
    }
};
