// Part of fp8_short_sm90: O^T.
#pragma once
#include "attention/fp8_short_sm90/plan.cuh"
#include "attention/fp8_sm90/values.cuh"

// A thread's part of O^T. Warpgroup w has column blocks 2 w and 2 w + 1. Rows g and g + 8 of a warp's 16 accumulator
// rows are its columns 2 g and 2 g + 1.
struct Output2 {
    float o[2][HEADS / 2];
};

// What a thread loads for one step of k: 16 rows, its warp's 16 columns of both blocks, and the rows' ratios.
struct RowColumns {
    uint32_t bytes[4], rope[4];
    Vec8 ratio[2];
};
__device__ __forceinline__ RowColumns load_row_columns(const Role& r, uint32_t rows, uint32_t ratios) {
    RowColumns c = {};
    ldmatrix_x4_trans(c.bytes, rows + r.lane % 16 * STRIDE + 128 * r.warpgroup + r.lane / 16 * 64 + 16 * r.warp);
    if (r.warpgroup == TILES - 1)
        ldmatrix_x4_trans(
            c.rope, rows + (r.lane / 16 * 8 + r.lane % 8) * STRIDE + ROPE_AT + 32 * r.warp + r.lane / 8 % 2 * 16);
#pragma unroll
    for (int v = 0; v < 2; ++v) c.ratio[v] = load_shared_8(ratios + 2 * TILE_ROWS * v);
    return c;
}
__device__ __forceinline__ void widen_row_columns(const Role& r, const RowColumns& c, uint32_t (&a)[2][4]) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        widen_pair(c.bytes[2 * v], c.ratio[v].x, a[v][0], a[v][1]);
        widen_pair(c.bytes[2 * v + 1], c.ratio[v].y, a[v][2], a[v][3]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n)
        a[1][n] = opaque(r.warpgroup == TILES - 1 ? c.rope[n] : a[1][n]);  // `opaque` as in fp8_sm90/values.cuh
}

// O^T = V^T . P^T, over the tiles whose bit is set.
__device__ __forceinline__ void multiply_pv(const Role& r, uint32_t tiles, Output2& out) {
    const uint64_t first_p = wgmma_operand(opaque(shared_address(shared)), 1024, 16);
#pragma unroll
    for (int i = 0; i < HEADS / 2; ++i) out.o[0][i] = out.o[1][i] = 0.0f;
#pragma unroll 1
    do {
        const int tile = __ffs(tiles) - 1;
        tiles &= tiles - 1;
        const uint64_t prob = wgmma_further(first_p, tile * HEADS_BLOCK_BYTES);
        const uint32_t rows = shared_address(shared) + ROWS_AT + tile * TILE_ROWS * STRIDE;
        const uint32_t ratios = shared_address(&rest().ratio[tile][2 * r.warpgroup][4 * r.t]);
        uint32_t a[2][2][4];
        RowColumns columns = load_row_columns(r, rows, ratios);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k > 1) wgmma_wait<1>();
            widen_row_columns(r, columns, a[k % 2]);
            if (k < 3) columns = load_row_columns(r, rows + 16 * (k + 1) * STRIDE, ratios + 2 * 16 * (k + 1));
            wgmma_fence();
#pragma unroll
            for (int v = 0; v < 2; ++v)
                wgmma<Values::F16, Sum::ADD, Major::K>(out.o[v], a[k % 2][v], wgmma_further(prob, 32 * k));
            wgmma_commit();
        }
        wgmma_wait<0>();
    } while (tiles != 0);
}
