// Part of fp8_sm90: O^T += V^T . P^T.
#pragma once
#include "attention/fp8_sm90/softmax.cuh"

// A thread's part of O^T, in four column blocks of 64 value columns, and of the denominators.
struct Output {
    float o[4][HEADS / 2], sum[SUMS];
};

// References were raised for the tile of warpgroup `owner`: multiplies O^T and the sums by the factors.
__device__ __forceinline__ void rescale_output(const Role& r, int owner, Output& out) {
    const Small& sm = small();
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float f = sm.factor[owner][r.head(c)];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            out.o[v][element(0, c)] *= f;
            out.o[v][element(1, c)] *= f;
        }
    }
#pragma unroll
    for (int c = 0; c < SUMS; ++c) out.sum[c] *= sm.factor[owner][sum_head(r, c)];
}

// Widens the bytes of rows 2 t and 2 t + 1 (of eight) in columns 2 g and 2 g + 1 to a pair of f16 for each column.
__device__ __forceinline__ void widen_pair(uint32_t bytes, uint32_t ratio, uint32_t& even, uint32_t& odd) {
    if (E5M2) {
        even = __byte_perm(bytes, 0, 0x2404), odd = bytes & 0xff00ff00;
    } else {
        e4m3x4_to_f16x2(__byte_perm(bytes, 0, 0x3120), even, odd);
    }
    if (PLAIN) return;
    even = multiply_f16x2(even, ratio);
    odd = multiply_f16x2(odd, ratio);
}

// What a thread loads for one step: 16 rows, this warp's 16 columns of column blocks 2 i and 2 i + 1, and the rows'
// ratios.
struct Columns {
    uint32_t bytes[4];
    Vec8 ratio[FINE_SCALES ? 2 : 1];  // of the thread's four rows: one for both column blocks, or one for each
    uint32_t rope[4];                 // HAS_ROPE: the last column block's A operand
};

// The address of this thread's ratios for the tile of warpgroup `owner`, in its first column block.
__device__ __forceinline__ uint32_t own_ratios(const Role& r, int owner) {
    constexpr int OF_HALF = PLAIN ? 0 : D_V / 2 / CHUNK_COLUMNS;  // chunks of a warpgroup's columns
    // A column block has four chunks, one for each warp, or two, one for two warps, or is part of one.
    const int within = CHUNK_COLUMNS == 16 ? r.warp : CHUNK_COLUMNS == 32 ? r.warp / 2 : 0;
    return shared_address(&small().ratio[owner][OF_HALF * r.warpgroup + within][4 * r.t]);
}

// The ratios for step k, `chunk` chunks after the first one.
__device__ __forceinline__ Vec8 load_ratios(uint32_t ratios, int chunk, int k) {
    return load_shared_8(ratios + 2 * (TILE_ROWS * chunk + 16 * k));
}

__device__ __forceinline__ Columns load_columns(const Role& r, uint32_t stage, uint32_t ratios, int k, int i) {
    const uint32_t rows = stage_address(stage) + row_offset(r.lane % 16), second = r.lane / 16;
    const uint32_t from = rows + 256 * r.warpgroup + 64 * second + 16 * r.warp;
    Columns c;
    if constexpr (!FINE_SCALES) {
        ldmatrix_x4_trans(c.bytes, from + 128 * i);
        if (FLOAT_SCALES) c.ratio[0] = load_ratios(ratios, i, k);
    } else {
        // HAS_ROPE: the last column block is RoPE, which has no ratios. The block before it is loaded instead, and not
        // used.
        constexpr int EACH = FINE_SCALES ? 64 / CHUNK_COLUMNS : 0;  // chunks in a column block
        ldmatrix_x4_trans(c.bytes, i == 0 || (HAS_ROPE && r.warpgroup == 1 && second) ? from : from + 128);
        c.ratio[0] = load_ratios(ratios, EACH * 2 * i, k);
        c.ratio[1] = load_ratios(ratios, HAS_ROPE && i == 1 ? EACH * (3 - r.warpgroup) : EACH * (2 * i + 1), k);
        if (HAS_ROPE && i == 1)
            ldmatrix_x4_trans(c.rope, stage_address(stage) + (r.lane / 16 * 8 + r.lane % 8) * STRIDE + ROPE_AT +
                                          32 * r.warp + r.lane / 8 % 2 * 16);
    }
    return c;
}

// Widens loaded columns to A operands.
__device__ __forceinline__ void widen_columns(const Role& r, const Columns& c, int i, uint32_t (&a)[2][4]) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        const Vec8& ratio = c.ratio[FINE_SCALES ? v : 0];
        widen_pair(c.bytes[2 * v], ratio.x, a[v][0], a[v][1]);
        widen_pair(c.bytes[2 * v + 1], ratio.y, a[v][2], a[v][3]);
    }
    if (FINE_SCALES && HAS_ROPE && i == 1) {
        // `opaque` makes the compiler choose here. Else it chooses after the fence, between two wgmma, and serialises
        // them.
#pragma unroll
        for (int n = 0; n < 4; ++n) a[1][n] = opaque(r.warpgroup == 1 ? c.rope[n] : a[1][n]);
    }
}

// O^T += V^T . P^T of warpgroup `owner`'s tile, whose first stage is `stage`. Each step multiplies two column blocks.
// Stages are released one by one. `meanwhile` runs beside the first products.
template <typename Act>
__device__ __forceinline__ void multiply_pv(const Role& r, uint32_t stage, int owner, bool raised, Output& out,
                                            Act meanwhile) {
    if (raised) rescale_output(rare_role(r), owner, out);
    const uint64_t prob = wgmma_operand(opaque(shared_address(shared) + P_AT) + owner * HEADS_BLOCK_BYTES, 1024, 16);
    const uint32_t ratios = opaque(own_ratios(r, owner));  // one base address, instead of registers for many
    uint32_t a[2][2][4];
    Columns columns = load_columns(r, stage, ratios, 0, 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (k > 0) wgmma_wait<1>();
            widen_columns(r, columns, i, a[i]);
            if (i == 0) {
                columns = load_columns(r, stage + k, ratios, k, 1);
            } else {
                release_reads();
                mbarrier_arrive_for_warp(shared_address(&small().empty[place_of(stage + k)]), r.lane);
                if (k < 3) columns = load_columns(r, stage + k + 1, ratios, k + 1, 0);
            }
            wgmma_fence();
#pragma unroll
            for (int v = 0; v < 2; ++v)
                wgmma<Values::F16, Sum::ADD, Major::K>(out.o[2 * i + v], a[i][v], wgmma_further(prob, 32 * k));
            wgmma_commit();
        }
        if (k == 0) meanwhile();
    }
    wgmma_wait<0>();
}
