// Fragments of mma's A operand straight from staged rows, as they lie in the cache: no tile of 16-bit rows is written.
//
// Sixteen rows are staged in two stages of eight, in lines of STAGED bytes, an odd multiple of 16. The orders of rows
// and of columns are free in both products as long as both operands agree. They are chosen so that no access meets a
// bank twice:
//
//   row of index k of 16    k even: k % 8 of stage 0; k odd: (k + 3) % 8 of stage 1; for k >= 8 one row further
//   Q . K^T  a lane reads 16 bytes of its two rows at a time, for two steps of k
//   P . V    a lane pairs the values of two rows
#pragma once
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"
#include "rows/reader.cuh"

static_assert(!Row::QUANTIZED, "bf16 rows");
constexpr int STAGED = Row::STAGED_BYTES, COPIED_BYTES = 2 * D_QK;
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

// What a lane reads of 64 columns for Q . K^T: twice 16 bytes of each of its two rows.
struct QkRaw {
    Vec16 x[2], y[2];
};
__device__ __forceinline__ QkRaw load_qk(uint32_t row, int at, int t) {
    QkRaw raw;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        raw.x[half] = load_shared_16(row + at + 64 * half + 16 * t);
        raw.y[half] = load_shared_16(row + STAGED + at + 64 * half + 16 * t);
    }
    return raw;
}

// The A operands of the four steps of k over 64 columns. In step j, index k = 2 t + e and 2 t + 8 + e are columns
// 32 (j / 2) + 8 t + 4 (j % 2) + e and + 2 + e.
__device__ __forceinline__ void arrange_qk(const QkRaw& raw, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Vec16 x = raw.x[half], y = raw.y[half];
        const uint32_t of_step[2][4] = {{x.x, y.x, x.y, y.y}, {x.z, y.z, x.w, y.w}};
#pragma unroll
        for (int i = 0; i < 8; ++i) a[2 * half + i / 4][i % 4] = of_step[i / 4][i % 4];
    }
}

// Where columns 4 `n` .. + 3 of a column block of Q go, so that Q agrees with the rows: the first two to this 16-bit
// item of a line of 64, the others 8 further.
__device__ __forceinline__ int q_item(int n) { return (n / 8 * 2 + n % 2) * 16 + n % 8 / 2 * 2; }

// The first of four columns of V of a lane, for each of its words q = 0 .. 3.
__device__ __forceinline__ int pv_column(int warp, int g, int q) { return 128 * q + 32 * warp + 4 * g; }

// The A operands of V's columns, two mma tiles of 16: row g + 8 i of tile m is column pv_column + 2 m + i. x and y are
// the same four values of the rows of index 2 t and 2 t + 1; x[1], y[1] those of index 8 further.
__device__ __forceinline__ void pv_pairs(const Vec8 (&x)[2], const Vec8 (&y)[2], uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        a[0][2 * i] = __byte_perm(x[i].x, y[i].x, 0x5410);
        a[0][2 * i + 1] = __byte_perm(x[i].x, y[i].x, 0x7632);
        a[1][2 * i] = __byte_perm(x[i].y, y[i].y, 0x5410);
        a[1][2 * i + 1] = __byte_perm(x[i].y, y[i].y, 0x7632);
    }
}

// Calls act(q, A operands of two mma tiles) for every word q of a lane's columns.
template <typename Act>
__device__ __forceinline__ void for_pv_fragments(const StagedRows& rows, int warp, int g, int t, Act act) {
    const uint32_t first = rows.pv_row(t, 0), second = rows.pv_row(t, 1);
    uint32_t a[2][4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const int at = 2 * pv_column(warp, g, q);
        const Vec8 x[2] = {load_shared_8(first + at), load_shared_8(first + STAGED + at)};
        const Vec8 y[2] = {load_shared_8(second + at), load_shared_8(second + STAGED + at)};
        pv_pairs(x, y, a);
        act(q, a);
    }
}
