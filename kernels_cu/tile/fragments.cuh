// Fragments of wgmma's A operand straight from staged rows, as they lie in the cache: no tile of 16-bit rows is written.
//
// Sixteen rows are staged as two units of eight, in lines of STAGED bytes, an odd multiple of 16. Row and column orders are
// free in both products as long as both operands agree, and are chosen so that no access meets a bank twice:
//
//   row of index k of 16    k even: k % 8 of unit 0; k odd: (k + 3) % 8 of unit 1; for k >= 8 one row further
//   Q . K^T  a lane reads 16 bytes of its two rows at a time: e4m3 for four steps of k, four values each, bfloat16 for two
//   P . V    a lane reads 4 values of four rows, 32 lanes 32 values of 16 rows, and pairs up what stands in two rows
#pragma once
#include "layout/reader.cuh"
#include "ptx/convert.cuh"
#include "ptx/wgmma_rows.cuh"
#include "tile/row_tile.cuh"

constexpr int STAGED = Rows::QUANTIZED ? Rows::STAGED_BYTES : 2 * D_QK + 16;
constexpr int COPIED_BYTES = Rows::QUANTIZED ? ROW_STRIDE : 2 * D_QK;
static_assert(STAGED % 32 == 16, "");
constexpr int UNIT_ROWS = 8, UNIT_BYTES = UNIT_ROWS * STAGED;

// V32_FP8 keeps its scales apart and multiplies unscaled e4m3 as f16; V4_FP8 scales while it widens to bf16.
constexpr bool FOLDED = Rows::FOLDED_SCALES > 0;
constexpr Type VALUES = FOLDED ? Type::F16 : Type::BF16;

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

// Two e4m3 pairs to two pairs of f16, exact.
__device__ __forceinline__ void e4m3x4_to_f16(uint32_t bytes, uint32_t& low, uint32_t& high) {
    asm("{\n"
        ".reg .b16 l, h;\n"
        "mov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l;\n"
        "cvt.rn.f16x2.e4m3x2 %1, h;\n"
        "}\n"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
}

// Four values to 16 bits: V32_FP8 as they are, V4_FP8 times the scales of the first and of the second of each pair.
__device__ __forceinline__ void widen(uint32_t bytes, float first, float second, uint32_t& low, uint32_t& high) {
    if constexpr (FOLDED) {
        e4m3x4_to_f16(bytes, low, high);
    } else {
        float v[4];
        e4m3x4_to_float(bytes, v);
        low = pack_bf16x2(v[0] * first, v[1] * second);
        high = pack_bf16x2(v[2] * first, v[3] * second);
    }
}

// V4_FP8: scale `i` of a staged row.
__device__ __forceinline__ float staged_scale(uint32_t row, int i) {
    return FOLDED ? 1.0f : ue8m0_to_float(load_shared_byte(row + ROW_STRIDE + i));
}

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
__device__ __forceinline__ void qk_wide(const QkRaw& raw, uint32_t (&a)[16]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Vec16 x = raw.x[half], y = raw.y[half];
        const uint32_t of_step[2][4] = {{x.x, y.x, x.y, y.y}, {x.z, y.z, x.w, y.w}};
#pragma unroll
        for (int i = 0; i < 8; ++i) a[8 * half + i] = of_step[i / 4][i % 4];
    }
}

// A for the four steps over 64 NoPE columns; e4m3: k = 2 t + e and 2 t + 8 + e are columns 16 t + 4 j + e and + 2 + e. `fx`,
// `fy`: the scales of the two rows there.
__device__ __forceinline__ void qk_nope(const QkRaw& raw, float fx, float fy, uint32_t (&a)[16]) {
    if constexpr (!Rows::QUANTIZED) {
        qk_wide(raw, a);
    } else {
        const Vec16 x = raw.x[0], y = raw.y[0];
        widen(x.x, fx, fx, a[0], a[2]);
        widen(y.x, fy, fy, a[1], a[3]);
        widen(x.y, fx, fx, a[4], a[6]);
        widen(y.y, fy, fy, a[5], a[7]);
        widen(x.z, fx, fx, a[8], a[10]);
        widen(y.z, fy, fy, a[9], a[11]);
        widen(x.w, fx, fx, a[12], a[14]);
        widen(y.w, fy, fy, a[13], a[15]);
    }
}

// Where columns 4 `n` .. + 3 of a block of Q go, to agree: the first two to this 16-bit item of a line of 64, the others 8
// further. `wide`: the block is bfloat16 in the cache.
__device__ __forceinline__ int q_item(int n, bool wide) {
    return wide ? (n / 8 * 2 + n % 2) * 16 + n % 8 / 2 * 2 : n % 4 * 16 + n / 4 * 2;
}

__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}

// Whether a warp's part of V's columns 128 `chunk` .. + 127 is bfloat16. V4_FP8: RoPE is a part of V.
__device__ __forceinline__ bool pv_is_wide(int chunk, int warp) { return !Rows::QUANTIZED || (D_NOPE < D_V && chunk == 3 && warp >= 2); }

// What a lane reads of 128 columns for P . V: four values of its four rows; [k][row].
struct PvRaw {
    uint32_t first[2][2], second[2][2];  // bfloat16: the first two and the second two values
    float scale[2][2];                   // V4_FP8
};
template <int CHUNK>
__device__ __forceinline__ PvRaw load_pv(const StagedRows& rows, int warp, int g, int t) {
    PvRaw raw;
    const bool wide = pv_is_wide(CHUNK, warp);
    const int of_wide = Rows::QUANTIZED ? ROPE_OFFSET + 8 * (8 * (warp - 2) + g) : 256 * CHUNK + 8 * (8 * warp + g);
    const int at = 128 * CHUNK + 4 * (8 * warp + g);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t row = rows.pv_row(t, k) + i * STAGED;
            if (wide) {
                const Vec8 v = load_shared_8(row + of_wide);
                raw.first[k][i] = v.x;
                raw.second[k][i] = v.y;
            } else {
                raw.first[k][i] = load_shared_4(row + at);
                raw.scale[k][i] = staged_scale(row, 2 * CHUNK + warp / 2);
            }
        }
    }
    return raw;
}

// A for V's columns 128 `chunk` .. + 127, as two tiles of 64: lane (w, g, .) has columns 4 (8 w + g) .. + 3 of them, two in
// each tile, of four rows.
template <int CHUNK>
__device__ __forceinline__ void pv_fragments(const PvRaw& raw, int warp, uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t x = raw.first[0][i], y = raw.first[1][i];
        if (pv_is_wide(CHUNK, warp)) {
            a[2 * i] = __byte_perm(x, y, 0x5410);
            a[2 * i + 1] = __byte_perm(x, y, 0x7632);
            a[4 + 2 * i] = __byte_perm(raw.second[0][i], raw.second[1][i], 0x5410);
            a[4 + 2 * i + 1] = __byte_perm(raw.second[0][i], raw.second[1][i], 0x7632);
        } else {
            const float fx = raw.scale[0][i], fy = raw.scale[1][i];
            widen(__byte_perm(x, y, 0x5140), fx, fy, a[2 * i], a[2 * i + 1]);
            widen(__byte_perm(x, y, 0x7362), fx, fy, a[4 + 2 * i], a[4 + 2 * i + 1]);
        }
    }
}
