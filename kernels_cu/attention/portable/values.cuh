// Part of portable: O += P.V in the output warps, all heads x 64 columns each.
//
// FOLDED: a warp multiplies P by the scale of its columns and rounds the product to bf16. This rounding error is the
// same in all columns under a scale, and with few rows errors do not average out. So a split of one tile multiplies
// the rounding errors of P by V, too, and adds them.
#pragma once
#include "attention/portable/scores.cuh"

using Output = float[M_TILES][V_TILES][4];

// Rescales O to the references of a tile.
__device__ __forceinline__ void rescale_output(int buffer, Output& o) {
    if (*reinterpret_cast<const uint32_t*>(small().rescaled[buffer]) == 0) return;
    const Role r = Role::here();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float by = small().rescale[buffer][16 * m + r.g + 8 * i];
#pragma unroll
            for (int v = 0; v < V_TILES; ++v) o[m][v][2 * i] *= by, o[m][v][2 * i + 1] *= by;
        }
    }
}

// Loads P of m tile m and 16 rows, in the form of shared memory.
__device__ __forceinline__ void load_p_tile(int buffer, int m, int k, uint32_t (&a)[4]) {
    load_fragment(p_fragment(buffer, m, k, Role::here().lane), a);
}

// FOLDED: the scales of a tile's rows that apply to a warp's columns; they are read two at a time.
__device__ __forceinline__ const float (&value_scales(const Role& r, int stage))
    [TILE_ROWS] { return small().scale[stage][r.warp * 64 / SCALE_COLUMNS]; }

// Loads P of 16 rows as A operands. FOLDED: times the scale of the warp's columns.
__device__ __forceinline__ void load_p(int stage, int buffer, int k, uint32_t (&a)[M_TILES][4]) {
    const Role r = Role::here();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) load_p_tile(buffer, m, k, a[m]);
    if constexpr (FOLDED) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 scale =
                *reinterpret_cast<const float2*>(&value_scales(r, stage)[16 * k + 8 * half + 2 * r.t]);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    const float2 p = f16x2_to_float(a[m][i]);
                    a[m][i] = pack_bf16x2(p.x * scale.x, p.y * scale.y);
                }
            }
        }
    }
}

// O += P.V of a tile. `wait` returns when products may begin.
template <typename Wait>
__device__ __forceinline__ void multiply_pv(int stage, int buffer, Output& o, Wait wait) {
    const Role r = Role::here();
    const uint32_t first =
        chunk_address(stage_address(stage), r.lane / 8 % 2 * 8 + r.lane % 8, r.warp * V_TILES + r.lane / 16);
    uint32_t a[M_TILES][4], b[2][4];
    ldmatrix_x4_trans(b[0], first);
    load_p(stage, buffer, 0, a);
    wait();
#pragma unroll
    for (int k = 0; k < K_TILES; ++k) {
        if (FOLDED && k > 0) load_p(stage, buffer, k, a);
#pragma unroll
        for (int v = 0; v < V_TILES; v += 2) {
            const int now = v / 2 % 2;
            const bool last = v + 2 == V_TILES, goes_on = last && k + 1 < K_TILES;  // to the next 16 rows
            if (!last) ldmatrix_x4_trans(b[1 - now], (first ^ ((v + 2) * 16)) + k * 16 * ROW_BYTES);
            if (goes_on) ldmatrix_x4_trans(b[1 - now], first + (k + 1) * 16 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                multiply(o[m][v], a[m], b[now][0], b[now][1]);
                multiply(o[m][v + 1], a[m], b[now][2], b[now][3]);
                if (!FOLDED && goes_on) load_p_tile(buffer, m, k + 1, a[m]);
            }
        }
    }
}

// FOLDED: adds to O what P times scale lost when load_p rounded it, times V. It works on one m tile at a time, with
// few registers.
__device__ __forceinline__ void multiply_rounding_errors(int stage, int buffer, Output& o) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll 1
        for (int k = 0; k < K_TILES; ++k) {
            const Role r = Role::here();
            uint32_t a[4];
            load_fragment(p_fragment(buffer, m, k, r.lane), a);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 p = f16x2_to_float(a[i]);
                const float2 scale =
                    *reinterpret_cast<const float2*>(&value_scales(r, stage)[16 * k + i / 2 * 8 + 2 * r.t]);
                const float x = p.x * scale.x, y = p.y * scale.y;
                const uint32_t rounded = pack_bf16x2(x, y);
                a[i] = pack_bf16x2(x - bf16_low(rounded), y - bf16_high(rounded));
            }
            const uint32_t first = chunk_address(stage_address(stage), 16 * k + r.lane / 8 % 2 * 8 + r.lane % 8,
                                                 r.warp * V_TILES + r.lane / 16);
#pragma unroll
            for (int v = 0; v < V_TILES; v += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, first ^ (v * 16));
                multiply(o[m][v], a, b[0], b[1]);
                multiply(o[m][v + 1], a, b[2], b[3]);
            }
        }
        __syncwarp();
    }
}
