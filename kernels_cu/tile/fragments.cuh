// Fragments of mma's A operand straight from staged rows, as they lie in the cache: no tile of 16-bit rows is written.
//
// Sixteen rows are staged in two stages of eight, in lines of STAGED bytes, an odd multiple of 16. The orders of rows
// and of columns are free in both products as long as both operands agree. They are chosen so that no access meets a
// bank twice:
//
//   row of index k of 16    k even: k % 8 of stage 0; k odd: (k + 3) % 8 of stage 1; for k >= 8 one row further
//   Q . K^T  a lane reads 16 bytes of its two rows at a time: e4m3 for four steps of k, four values each; bfloat16 for
//            two
//   P . V    a lane reads 16 values of four rows and pairs the values of two rows
#pragma once
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"
#include "rows/reader.cuh"

// V32_FP8: e4m3 are multiplied unscaled, as f16, and scales are kept apart. Otherwise rows are bf16.
constexpr bool FOLDED = Row::FOLDED_SCALES > 0;
static_assert(FOLDED == Row::QUANTIZED, "V4_FP8 has a kernel of its own, which is faster at any number of heads");

constexpr int STAGED = Row::STAGED_BYTES, COPIED_BYTES = FOLDED ? ROW_STRIDE : 2 * D_QK;
static_assert(STAGED % 32 == 16, "");
constexpr int STAGE_ROWS = 8, STAGE_BYTES = STAGE_ROWS * STAGED;

// Where a lane's first row of Q . K^T stands, the stage and the row in it. The second row is the next one.
struct FirstRow {
    int stage, row;
};
__device__ __forceinline__ FirstRow first_qk_row(int g) { return {g & 1, g & 1 ? (g + 3) & 7 : g}; }

// A lane's view of 16 staged rows, the addresses of both stages.
struct StagedRows {
    uint32_t stage[2];

    __device__ __forceinline__ uint32_t qk_row(int g) const {
        const FirstRow first = first_qk_row(g);
        return (first.stage == 0 ? stage[0] : stage[1]) + first.row * STAGED;
    }
    // The row of index 2 t + k (k = 0, 1) in P . V. That of index 2 t + k + 8 is one further.
    __device__ __forceinline__ uint32_t pv_row(int t, int k) const {
        return stage[k] + ((2 * t + 4 * k) & 7) * STAGED;
    }
};

// What a lane reads of 64 columns for Q . K^T: 16 bytes of each of its two rows, of bfloat16 (`wide`) twice that.
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

// The A operands of the four steps of k over 64 bfloat16 columns. In step j, index k = 2 t + e and 2 t + 8 + e are
// columns 32 (j / 2) + 8 t + 4 (j % 2) + e and + 2 + e.
__device__ __forceinline__ void qk_wide(const QkRaw& raw, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Vec16 x = raw.x[half], y = raw.y[half];
        const uint32_t of_step[2][4] = {{x.x, y.x, x.y, y.y}, {x.z, y.z, x.w, y.w}};
#pragma unroll
        for (int i = 0; i < 8; ++i) a[2 * half + i / 4][i % 4] = of_step[i / 4][i % 4];
    }
}

// The A operands of the four steps of k over 64 NoPE columns; e4m3: k = 2 t + e and 2 t + 8 + e are columns 16 t + 4 j
// + e and + 2 + e.
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

// Where columns 4 `n` .. + 3 of a column block of Q go, so that Q agrees with the rows: the first two to this 16-bit
// item of a line of 64, the others 8 further. `wide`: the column block is bfloat16 in the cache.
__device__ __forceinline__ int q_item(int n, bool wide) {
    return wide ? (n / 8 * 2 + n % 2) * 16 + n % 8 / 2 * 2 : n % 4 * 16 + n / 4 * 2;
}

// The first of four columns of V of a lane, for each of its words q = 0 .. 3. V32_FP8: words of 16 neighbouring bytes,
// so that a warp has the columns of one scale. Otherwise each word is of another 128 columns.
__device__ __forceinline__ int pv_column(int warp, int g, int q) {
    return FOLDED ? 128 * warp + 16 * g + 4 * q : 128 * q + 32 * warp + 4 * g;
}

// The A operands of V's columns, two mma tiles of 16: row g + 8 i of tile m is column pv_column + 2 m + i. x and y are
// the same four values of the rows of index 2 t and 2 t + 1; x[1], y[1] those of index 8 further.
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

// V32_FP8: a lane's 16 values of its four rows, which can be read ahead.
struct PvRaw {
    Vec16 x0, x1, y0, y1;
};
__device__ __forceinline__ PvRaw load_pv(const StagedRows& rows, int warp, int g, int t) {
    if constexpr (!FOLDED) return {};
    const int at = pv_column(warp, g, 0);
    const uint32_t first = rows.pv_row(t, 0) + at, second = rows.pv_row(t, 1) + at;
    return {load_shared_16(first), load_shared_16(first + STAGED), load_shared_16(second),
            load_shared_16(second + STAGED)};
}

// Calls act(q, A operands of two mma tiles) for every word q of a lane's columns.
template <typename Act>
__device__ __forceinline__ void for_pv_fragments(const PvRaw& raw, const StagedRows& rows, int warp, int g, int t,
                                                 Act act) {
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
