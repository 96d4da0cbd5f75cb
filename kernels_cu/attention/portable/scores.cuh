// Part of portable: Q in registers and shared memory, and S = Q.K^T in the score warps.
//
// A score warp multiplies its slice of the columns in steps of 16. The slice has two ranges: one of the first D_V
// columns, and one of those behind. Then the warps of a group add their parts of S through shared memory. If a group
// has two m tiles, each of its two warps gets the sums of one of them; if it has one, all warps get all sums.
#pragma once
#include "attention/portable/rows.cuh"
#include "ptx/convert.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma_sync.cuh"

// Loads a fragment from shared memory as an A operand.
__device__ __forceinline__ void load_fragment(uint32_t at, uint32_t (&a)[4]) {
    const Vec16 v = load_shared_16(at);
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
}

// C += A.B, 16 columns of k.
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (HALF_ITEMS) {
        mma_m16n8k16_f16(c, a, b0, b1);
    } else {
        mma_m16n8k16(c, a, b0, b1);
    }
}

template <typename T>
__device__ __forceinline__ void clear(T& acc) {
#pragma unroll
    for (auto& row : acc) {
#pragma unroll
        for (auto& c : row) c[0] = c[1] = c[2] = c[3] = 0.0f;
    }
}

// --- Q ------------------------------------------------------------------------------------------------------------

using QRegisters = uint32_t[Q_IN_REGISTERS][GROUP_TILES][4];

// Loads two values of Q as bf16. ALIGNED: from a multiple of 4 bytes.
template <bool ALIGNED>
__device__ __forceinline__ uint32_t load_q_pair(const bf16* q) {
    return ALIGNED ? *reinterpret_cast<const uint32_t*>(q) : q[0] | uint32_t(q[1]) << 16;
}
// The same for e4m3, at any address.
template <bool>
__device__ __forceinline__ uint32_t load_q_pair(const uint8_t* q) {
    float v[4];
    e4m3x4_to_float(q[0] | uint32_t(q[1]) << 8, v);
    return pack_bf16x2(v[0], v[1]);
}

// The address of this lane's fragment (step, m) of a score warp's Q in shared memory.
__device__ __forceinline__ uint32_t q_fragment(const Role& r, int step, int m) {
    return shared_address(shared) + Q_AT +
           (((r.warp * Q_IN_SHARED + step - Q_IN_REGISTERS) * GROUP_TILES + m) * 32 + r.lane) * 16;
}

// Loads a score warp's Q into registers and shared memory. Heads beyond h_q repeat the last head: so no load needs a
// branch, and all are in flight at once. Item: bf16, or uint8_t for e4m3.
template <typename Item, bool ALIGNED>
__device__ __forceinline__ void load_q(const AttentionParams& p, const WorkItem& w, QRegisters& q) {
    const Role r = Role::here();
    const Item* lines[GROUP_TILES][2];
#pragma unroll
    for (int m = 0; m < GROUP_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = w.first_head + 16 * r.tile_of_cta(m) + r.g + 8 * i;
            const int line = min(head, p.h_q - 1);
            lines[m][i] = q_of<Item>(p, query_at(p, w.query, line), head_at(p, line)) + 2 * r.t;
        }
    }
    const int columns = r.slice() * (D_V / SLICES), last_columns = D_V + r.slice() * ((D_QK - D_V) / SLICES);
    const auto load = [&](int step, int m, uint32_t (&a)[4]) {
        const int column = step < V_STEPS ? columns + 16 * step : last_columns + 16 * (step - V_STEPS);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = load_q_pair<ALIGNED>(lines[m][i % 2] + column + i / 2 * 8);
    };
    constexpr int AT_ONCE = 3;
#pragma unroll
    for (int begin = Q_IN_REGISTERS; begin < STEPS; begin += AT_ONCE) {
        uint32_t a[AT_ONCE][GROUP_TILES][4];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int m = 0; m < GROUP_TILES; ++m) {
                if (begin + i < STEPS) load(begin + i, m, a[i][m]);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int m = 0; m < GROUP_TILES; ++m) {
                if (begin + i < STEPS)
                    store_shared_16(q_fragment(r, begin + i, m), {a[i][m][0], a[i][m][1], a[i][m][2], a[i][m][3]});
            }
        }
    }
#pragma unroll
    for (int step = 0; step < Q_IN_REGISTERS; ++step) {
#pragma unroll
        for (int m = 0; m < GROUP_TILES; ++m) load(step, m, q[step][m]);
        if (!ALIGNED && step % AT_ONCE == 0)
            __syncwarp();  // limits the loads in flight: each half word takes a register
    }
}

__device__ __forceinline__ void load_q(const AttentionParams& p, const WorkItem& w, QRegisters& q) {
    if (SCALE_OF_CALL && p.flags & E4M3_Q) {
        load_q<uint8_t, false>(p, w, q);
    } else if (p.flags & ALIGNED_Q) {
        load_q<bf16, true>(p, w, q);
    } else {
        load_q<bf16, false>(p, w, q);
    }
}

// Loads the A operand of a step and an m tile.
__device__ __forceinline__ void load_q_operand(const QRegisters& q, int step, int m, uint32_t (&a)[4]) {
    if (step < Q_IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = q[step < Q_IN_REGISTERS ? step : 0][m][i];
    } else {
        load_fragment(q_fragment(Role::here(), step, m), a);
    }
}

// --- K ------------------------------------------------------------------------------------------------------------

// B fragments of one step of k, for all rows of a tile.
using KStep = uint32_t[N_TILES / 2][4];

// The addresses of a score warp's columns in a tile.
struct KAddresses {
    uint32_t columns, last_columns;

    static __device__ __forceinline__ KAddresses of(uint32_t stage) {
        const Role r = Role::here();
        const int row = r.lane / 16 * 8 + r.lane % 8, half = r.lane / 8 % 2;
        return {chunk_address(stage, row, half) + r.slice() * (2 * D_V / SLICES),
                chunk_address(stage, row, r.slice() * 2 * (STEPS - V_STEPS) + half) + 2 * D_V};
    }
    __device__ __forceinline__ void load(KStep& b, int step) const {
        const int i = step < V_STEPS ? step : step - V_STEPS;
        const uint32_t at = ((step < V_STEPS ? columns : last_columns) ^ (i % 4 * 32)) + i / 4 * 128;
#pragma unroll
        for (int pair = 0; pair < N_TILES / 2; ++pair) ldmatrix_x4(b[pair], at + pair * 16 * ROW_BYTES);
    }
};

// --- a warp's part of S -------------------------------------------------------------------------------------------

using Scores = float[GROUP_TILES][N_TILES][4];

// FOLDED: S is scaled after the last column under each scale. A warp with one scale c computes S c. A warp with two
// scales computes (S_0 c_0 / c_1 + S_1) c_1. This is the factor after the columns of scale number `number`, for the
// rows of this thread's columns of S.
__device__ __forceinline__ float2 fold_factor(int stage, int number, int row) {
    const Small& sm = small();
    const int slice = Role::here().slice();
    if (SLICES == 4) return *reinterpret_cast<const float2*>(&sm.scale[stage][slice][row]);
    if (number == 0) return *reinterpret_cast<const float2*>(&sm.ratio[stage][slice][row]);
    const float2 first = *reinterpret_cast<const float2*>(&sm.scale[stage][2 * slice][row]);
    const float2 second = *reinterpret_cast<const float2*>(&sm.scale[stage][2 * slice + 1][row]);
    return make_float2(least_scale(first.x, second.x), least_scale(first.y, second.y));
}

__device__ __forceinline__ void fold_scale(int stage, int number, Scores& s) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const float2 by = fold_factor(stage, number, 8 * n + 2 * Role::here().t);
#pragma unroll
        for (int m = 0; m < GROUP_TILES; ++m) {
            s[m][n][0] *= by.x;
            s[m][n][1] *= by.y;
            s[m][n][2] *= by.x;
            s[m][n][3] *= by.y;
        }
    }
}

__device__ __forceinline__ void add(const Scores& more, Scores& s) {
#pragma unroll
    for (int m = 0; m < GROUP_TILES; ++m) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n][i] += more[m][n][i];
        }
    }
}

// A warp's part of S: over its columns.
__device__ __forceinline__ void multiply_qk(int stage, const QRegisters& q, Scores& s) {
    constexpr int SCALE_STEPS = FOLDED ? SCALE_COLUMNS / 16 : STEPS + 1;
    const KAddresses k = KAddresses::of(stage_address(stage));
    KStep b[2];
    Scores odd;
    k.load(b[0], 0);
    clear(s);
    clear(odd);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const KStep& now = b[step % 2];
        if (step + 1 < STEPS) k.load(b[(step + 1) % 2], step + 1);
#pragma unroll
        for (int m = 0; m < GROUP_TILES; ++m) {
            uint32_t a[4];
            load_q_operand(q, step, m, a);
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
                multiply(SEPARATE_ODD_STEPS && step % 2 ? odd[m][n] : s[m][n], a, now[n / 2][n % 2 * 2],
                         now[n / 2][n % 2 * 2 + 1]);
        }
        const bool folds = step < V_STEPS && step % SCALE_STEPS == SCALE_STEPS - 1;
        if (SEPARATE_ODD_STEPS && (folds || step == STEPS - 1)) {
            add(odd, s);
            clear(odd);
        }
        if (folds) fold_scale(stage, step / SCALE_STEPS, s);
    }
}

// --- the sums of all parts ----------------------------------------------------------------------------------------

__device__ __forceinline__ float4* part_of(const Role& r, int warp, int buffer) {
    return reinterpret_cast<float4*>(shared + PARTS_AT + buffer % PART_BUFFERS * PART_BUFFER + warp * PART_BYTES) +
           r.lane;
}

// Stores the part of S that the other warps of the group need: one m tile.
__device__ __forceinline__ void store_part(const Scores& s, int buffer) {
    const Role r = Role::here();
    float4* to = part_of(r, r.warp, buffer);
    constexpr int GIVEN = GROUP_TILES - 1;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
        to[32 * n] = make_float4(s[GIVEN][n][0], s[GIVEN][n][1], s[GIVEN][n][2], s[GIVEN][n][3]);
}

// S of a warp's own m tile.
using OwnScores = float[N_TILES][4];

// The sums of this warp's own m tile. All warps add in the same order.
__device__ __forceinline__ void add_parts(const Scores& s, int buffer, OwnScores& own) {
    const Role r = Role::here();
    if constexpr (ALL_WARPS_GET_SUMS) {
#pragma unroll
        for (int i = 0; i < SLICES; ++i) {
            const float4* from = part_of(r, r.group() * SLICES + i, buffer);
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) {
                const float4 v = from[32 * n];
                own[n][0] = i == 0 ? v.x : own[n][0] + v.x;
                own[n][1] = i == 0 ? v.y : own[n][1] + v.y;
                own[n][2] = i == 0 ? v.z : own[n][2] + v.z;
                own[n][3] = i == 0 ? v.w : own[n][3] + v.w;
            }
        }
    } else {
        const float4* from = part_of(r, r.warp ^ 1, buffer);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            const float4 v = from[32 * n];
            own[n][0] = s[0][n][0] + v.x;
            own[n][1] = s[0][n][1] + v.y;
            own[n][2] = s[0][n][2] + v.z;
            own[n][3] = s[0][n][3] + v.w;
        }
    }
}
