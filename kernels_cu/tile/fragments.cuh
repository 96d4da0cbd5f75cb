// Fragments of mma's A operand straight from staged rows, as they lie in the cache: no tile of 16-bit rows is written.
//
// Sixteen rows are staged as two units of eight, in lines of STAGED bytes, an odd multiple of 16. Row and column orders are
// free in both products as long as both operands agree, and are chosen so that no access meets a bank twice:
//
//   row of index k of 16    k even: k % 8 of unit 0; k odd: (k + 3) % 8 of unit 1; for k >= 8 one row further
//   Q . K^T  a lane reads 16 bytes of its two rows at a time: e4m3 for four steps of k, four values each, bfloat16 for two
//   P . V    a lane reads 16 values of four rows and pairs up what stands in two rows
#pragma once
#include "rows/reader.cuh"
#include "ptx/convert.cuh"
#include "tile/row_tile.cuh"

// V32_FP8, whose scales are kept apart and whose unscaled e4m3 are multiplied as f16; else bf16.
constexpr bool FOLDED = Rows::FOLDED_SCALES > 0;
static_assert(FOLDED == Rows::QUANTIZED, "V4_FP8 has a kernel of its own, which is faster at any number of heads");

constexpr int STAGED = FOLDED ? Rows::STAGED_BYTES : 2 * D_QK + 16;
constexpr int COPIED_BYTES = FOLDED ? ROW_STRIDE : 2 * D_QK;
static_assert(STAGED % 32 == 16, "");
constexpr int UNIT_ROWS = 8, UNIT_BYTES = UNIT_ROWS * STAGED;

// Where a lane's first row of Q . K^T stands, the second being the next one: unit and row of it.
struct FirstRow {
    int unit, row;
};
__device__ __forceinline__ FirstRow first_qk_row(int g) { return {g & 1, g & 1 ? (g + 3) & 7 : g}; }

// A lane's view of 16 staged rows: addresses of rows of Q . K^T and of the two first rows of P . V.
struct StagedRows {
    uint32_t unit[2];

    __device__ __forceinline__ uint32_t qk_row(int g) const {
        const FirstRow first = first_qk_row(g);
        return (first.unit == 0 ? unit[0] : unit[1]) + first.row * STAGED;
    }
    // Rows of k = 2 t, 2 t + 1; those of 2 t + 8, 2 t + 9 are one further.
    __device__ __forceinline__ uint32_t pv_row(int t, int k) const { return unit[k] + ((2 * t + 4 * k) & 7) * STAGED; }
};

// What a lane reads of 64 columns for Q . K^T: 16 bytes of each of its rows, bfloat16 twice that.
struct QkRaw {
    Vec16 x[2], y[2];
};
__device__ __forceinline__ QkRaw load_qk(uint32_t row, int at, bool wide, int t) {
    QkRaw raw;
    raw.x[0] = load_shared_16(row + at + 16 * t);
    raw.y[0] = load_shared_16(row + STAGED + at + 16 * t);
    if (wide) {
        raw.x[1] = load_shared_16(row + at + 64 + 16 * t);
        raw.y[1] = load_shared_16(row + STAGED + at + 64 + 16 * t);
    }
    return raw;
}

// A for the four steps over 64 bfloat16 columns. In step j, k = 2 t + e and 2 t + 8 + e are columns
// 32 (j / 2) + 8 t + 4 (j % 2) + e and + 2 + e.
__device__ __forceinline__ void qk_wide(const QkRaw& raw, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Vec16 x = raw.x[half], y = raw.y[half];
        const uint32_t of_step[2][4] = {{x.x, y.x, x.y, y.y}, {x.z, y.z, x.w, y.w}};
#pragma unroll
        for (int i = 0; i < 8; ++i) a[2 * half + i / 4][i % 4] = of_step[i / 4][i % 4];
    }
}

// A for the four steps over 64 NoPE columns; e4m3: k = 2 t + e and 2 t + 8 + e are columns 16 t + 4 j + e and + 2 + e.
__device__ __forceinline__ void qk_nope(const QkRaw& raw, uint32_t (&a)[4][4]) {
    if constexpr (!FOLDED) {
        qk_wide(raw, a);
    } else {
        const Vec16 x = raw.x[0], y = raw.y[0];
        const uint32_t xs[] = {x.x, x.y, x.z, x.w}, ys[] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            e4m3x4_to_f16x2(xs[j], a[j][0], a[j][2]);
            e4m3x4_to_f16x2(ys[j], a[j][1], a[j][3]);
        }
    }
}

// Where columns 4 `n` .. + 3 of a block of Q go, to agree: the first two to this 16-bit item of a line of 64, the others 8
// further. `wide`: the block is bfloat16 in the cache.
__device__ __forceinline__ int q_item(int n, bool wide) {
    return wide ? (n / 8 * 2 + n % 2) * 16 + n % 8 / 2 * 2 : n % 4 * 16 + n / 4 * 2;
}

// Four columns of V of a lane, of its four words: V32_FP8 word `q` of 16 bytes, so that a warp has the columns of one scale; else
// of another 128 columns each.
__device__ __forceinline__ int pv_column(int warp, int g, int q) {
    return FOLDED ? 128 * warp + 16 * g + 4 * q : 128 * q + 32 * warp + 4 * g;
}

// A for V's columns, two tiles of 16: row g + 8 i of tile m is column pv_column + 2 m + i. From the same four values of rows
// k = 2 t (x) and 2 t + 1 (y); one row further (i = 1) of k + 8.
__device__ __forceinline__ void pv_pairs(const uint32_t (&x)[2], const uint32_t (&y)[2], uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        e4m3x4_to_f16x2(__byte_perm(x[i], y[i], 0x5140), a[0][2 * i], a[0][2 * i + 1]);
        e4m3x4_to_f16x2(__byte_perm(x[i], y[i], 0x7362), a[1][2 * i], a[1][2 * i + 1]);
    }
}
__device__ __forceinline__ void pv_wide_pairs(const Vec8 (&x)[2], const Vec8 (&y)[2], uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        a[0][2 * i] = __byte_perm(x[i].x, y[i].x, 0x5410);
        a[0][2 * i + 1] = __byte_perm(x[i].x, y[i].x, 0x7632);
        a[1][2 * i] = __byte_perm(x[i].y, y[i].y, 0x5410);
        a[1][2 * i + 1] = __byte_perm(x[i].y, y[i].y, 0x7632);
    }
}

// V32_FP8: a lane's 16 values of its four rows, two from `x` and two from `y` on, which can be read ahead.
struct PvRaw {
    Vec16 x0, x1, y0, y1;
};
__device__ __forceinline__ PvRaw load_pv(const StagedRows& rows, int warp, int g, int t) {
    if constexpr (!FOLDED) return {};
    const int at = pv_column(warp, g, 0);
    const uint32_t first = rows.pv_row(t, 0) + at, second = rows.pv_row(t, 1) + at;
    return {load_shared_16(first), load_shared_16(first + STAGED), load_shared_16(second), load_shared_16(second + STAGED)};
}

// For every word `q` of a lane's columns: act(q, A of its two tiles).
template <typename Do>
__device__ __forceinline__ void for_pv_fragments(const PvRaw& raw, const StagedRows& rows, int warp, int g, int t, Do act) {
    const uint32_t first = rows.pv_row(t, 0), second = rows.pv_row(t, 1);
    uint32_t a[2][4];
    if constexpr (FOLDED) {
        const Vec16 &x0 = raw.x0, &x1 = raw.x1, &y0 = raw.y0, &y1 = raw.y1;
        const uint32_t xs[4][2] = {{x0.x, x1.x}, {x0.y, x1.y}, {x0.z, x1.z}, {x0.w, x1.w}};
        const uint32_t ys[4][2] = {{y0.x, y1.x}, {y0.y, y1.y}, {y0.z, y1.z}, {y0.w, y1.w}};
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            pv_pairs(xs[q], ys[q], a);
            act(q, a);
        }
    } else {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int at = 2 * pv_column(warp, g, q);
            const Vec8 x[2] = {load_shared_8(first + at), load_shared_8(first + STAGED + at)};
            const Vec8 y[2] = {load_shared_8(second + at), load_shared_8(second + STAGED + at)};
            pv_wide_pairs(x, y, a);
            act(q, a);
        }
    }
}
