// Part of fp8_sm90: S^T = K . Q^T.
#pragma once
#include "attention/fp8_sm90/scales.cuh"
#include "ptx/wgmma.cuh"

// 16 bytes of each of a thread's two rows: the A operands of four steps of k.
struct Bytes {
    Vec16 x, y;
};

// Widens bytes to A operands. SCALED: times `ratio`, pairs of f16. E5M2: the bytes are e5m2.
template <bool SCALED = FINE_SCALES>
__device__ __forceinline__ void widen_bytes(const Bytes& bytes, const uint32_t (&ratio)[2], uint32_t (&a)[4][4]) {
    const Vec16 &x = bytes.x, &y = bytes.y;
    const uint32_t words[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            if (E5M2 && SCALED) {
                a[i][row] = __byte_perm(words[row][i], 0, 0x1404);
                a[i][row + 2] = __byte_perm(words[row][i], 0, 0x3424);
            } else {
                e4m3x4_to_f16x2(words[row][i], a[i][row], a[i][row + 2]);
            }
            if (SCALED) {
                a[i][row] = multiply_f16x2(a[i][row], ratio[row]);
                a[i][row + 2] = multiply_f16x2(a[i][row + 2], ratio[row]);
            }
        }
    }
}

__device__ __forceinline__ uint64_t q_operand() {
    return wgmma_operand(opaque(shared_address(shared) + Q_AT), 1024, 16);
}

// Starts four steps of k with column block `block` of Q. SUM: whether the first step sets S or adds to it.
template <Values VALUES, Sum SUM>
__device__ __forceinline__ void start_qk(uint64_t q, int block, const uint32_t (&a)[4][4], float (&s)[HEADS / 2]) {
    wgmma_fence();
    wgmma<VALUES, SUM, Major::K>(s, a[0], wgmma_further(q, block * HEADS_BLOCK_BYTES));
#pragma unroll
    for (int i = 1; i < 4; ++i)
        wgmma<VALUES, Sum::ADD, Major::K>(s, a[i], wgmma_further(q, block * HEADS_BLOCK_BYTES + 32 * i));
    wgmma_commit();
}

__device__ __forceinline__ void scale_rows(float (&s)[HEADS / 2], float x, float y) {
#pragma unroll
    for (int i = 0; i < HEADS / 2; ++i) s[i] *= i % 4 < 2 ? x : y;
}

// Arranges RoPE of two rows as A operands.
__device__ __forceinline__ void arrange_rope(const uint32_t (&rope)[2][8], uint32_t (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) a[i][row] = rope[row][2 * i], a[i][row + 2] = rope[row][2 * i + 1];
    }
}

// The index in its row of this thread's 16 bytes of NoPE column block `block`.
__device__ __forceinline__ int chunk_of_block(int t, int block) {
    return !are_alone(block / 2) ? 8 * (block / 2) + 2 * t + block % 2 : 4 * block + t;
}
__device__ __forceinline__ Bytes load_block(uint32_t row, int t, int block) {
    const uint32_t at = row + 16 * chunk_of_block(t, block);
    return {load_shared_16(at), load_shared_16(at + 8 * STRIDE)};
}

// FP4 rows: the codes of the same values.
struct Codes {
    Vec8 x, y;
};
__device__ __forceinline__ Codes load_codes(uint32_t row, int t, int block) {
    const uint32_t at = row + CODES_AT + 8 * chunk_of_block(t, block);
    return {load_shared_8(at), load_shared_8(at + 8 * STRIDE)};
}

// Eight codes as bytes: e4m3, or with E5M2 the upper bytes of f16.
__device__ __forceinline__ Vec8 expand_codes(uint32_t codes) {
    return E5M2 ? e2m1_to_e5m2_8(codes) : e2m1_to_e4m3_8(codes);
}

__device__ __forceinline__ Bytes expand_block(const Codes& codes) {
    auto expand = [](const Vec8& v) -> Vec16 {
        const Vec8 first = expand_codes(v.x), second = expand_codes(v.y);
        return {first.x, first.y, second.x, second.y};
    };
    return {expand(codes.x), expand(codes.y)};
}

// Stores expanded bytes to the ring, from where multiply_pv reads them. They overwrite codes, but never codes that a
// lane is still to load: those of the next column block have been loaded, and the bytes of two column blocks end
// before the codes of later blocks begin.
__device__ __forceinline__ void store_block(uint32_t row, int t, int block, const Bytes& bytes) {
    static_assert(!EXPAND || 64 * (D_NOPE / 128) <= CODES_AT, "bytes end before the codes of later blocks");
    __syncwarp();
    const uint32_t at = row + 16 * chunk_of_block(t, block);
    store_shared_16(at, bytes.x);
    store_shared_16(at + 8 * STRIDE, bytes.y);
}

// In the functions below, bytes of later column blocks are loaded and widened while wgmma multiplies.

// Float32 scales: between chunks S^T is multiplied by the quotient of this chunk's scale and the next one's.
__device__ __forceinline__ RowScales multiply_qk_float_scales(const Role& r, uint32_t row, uint32_t stage,
                                                              float logit_scale, float (&s)[HEADS / 2]) {
    static_assert(!FLOAT_SCALES || (CHUNKS == 4 && SCALE_TILE == 128), "two column blocks a scale");
    const uint32_t none[2] = {0, 0};
    const uint64_t q = q_operand();
    const int t = r.t;
    uint32_t a[2][4][4];
    Bytes bytes = load_block(row, t, 0);
    if (__builtin_expect(__any_sync(~0u, has_zero_scale(row, t) | has_zero_scale(row + 8 * STRIDE, t)), 0)) {
        clear_under_zeros(row, r, small().marks[place_of(stage)]);
        bytes = load_block(row, t, 0);
    }
    float scale[2][4];
    load_float_scales(row, scale[0]);
    load_float_scales(row + 8 * STRIDE, scale[1]);
    widen_bytes(bytes, none, a[0]);
    bytes = load_block(row, t, 1);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        if (c == 0) {
            start_qk<Values::F16, Sum::SET>(q, 0, a[0], s);
        } else {
            start_qk<Values::F16, Sum::ADD>(q, 2 * c, a[0], s);
        }
        widen_bytes(bytes, none, a[1]);
        if (c < 3) bytes = load_block(row, t, 2 * c + 2);
        start_qk<Values::F16, Sum::ADD>(q, 2 * c + 1, a[1], s);
        if (c == 3 && !HAS_ROPE) break;  // the last scale becomes a factor in `logit`
        wgmma_wait<1>();
        if (c < 3) {
            widen_bytes(bytes, none, a[0]);
            bytes = load_block(row, t, 2 * c + 3);
        } else {
            uint32_t rope[2][8];
            load_rope(row, t, rope[0]);
            load_rope(row + 8 * STRIDE, t, rope[1]);
            arrange_rope(rope, a[0]);
        }
        const float x = c < 3 ? scale[0][c] * reciprocal_approx(scale[0][(c + 1) % 4]) : scale[0][3];
        const float y = c < 3 ? scale[1][c] * reciprocal_approx(scale[1][(c + 1) % 4]) : scale[1][3];
        wgmma_wait<0>();
        scale_rows(s, x, y);
    }
    if (HAS_ROPE) start_qk<Values::BF16, Sum::ADD>(q, NOPE_BLOCKS, a[0], s);
    RowScales result;
    float ratio[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int exponent =
            __float_as_uint(fmaxf(fmaxf(scale[i][0], scale[i][1]), fmaxf(scale[i][2], scale[i][3]))) >> 23;
        const float own = t < 2 ? (t == 0 ? scale[i][0] : scale[i][1]) : (t == 2 ? scale[i][2] : scale[i][3]);
        result.r[i] = power_of_two(exponent);
        result.logit[i] = HAS_ROPE ? logit_scale : scale_logits(logit_scale, scale[i][3]);
        ratio[i] = own * inverse_power_of_two(exponent);
    }
    result.ratio[0] = pack_f16x2(ratio[0], ratio[1]);
    wgmma_wait<0>();
    return result;
}

// Scales of at most 64 columns: K is multiplied by scale / r when it is widened. `of_extra`: FP4_EXTRA, the rows are
// the extra cache's.
__device__ __forceinline__ RowScales multiply_qk_fine_scales(uint32_t row, int t, bool of_extra, float logit_scale,
                                                             float (&s)[HEADS / 2]) {
    static_assert(!E8M0_SCALES || SCALE_TILE == (HAS_ROPE ? 64 : 32), "V4_FP8 or V41_FP8");
    constexpr int SCALE_BLOCKS = CHUNK_COLUMNS == 16 ? 1 : 2;  // column blocks in which a thread needs one scale
    constexpr int BLOCKS = NOPE_BLOCKS + ROPE_CODED;
    const uint64_t q = q_operand();
    const bool has_codes = FP4 || of_extra;
    uint32_t ratio[ceil_div(NOPE_BLOCKS, SCALE_BLOCKS)][2], a[2][4][4];
    Bytes bytes;
    Codes codes;  // instead of `bytes` where has_codes; not of RoPE
    auto load = [&](int block) {
        if (!has_codes || block >= NOPE_BLOCKS) {
            bytes = load_block(row, t, block);
        } else {
            codes = load_codes(row, t, block);
        }
    };
    load(0);
    RowScales result;
    float own[2][2];  // V4_FP8: go to result.ratio only after the products, to save registers
    if constexpr (HAS_ROPE) {
        uint32_t rope[2][8];
        if constexpr (FP4) {
            result = scales_of_fp4_and_rope(row, t, logit_scale, rope);
        } else {
            result = load_scales_of_64(row, t, logit_scale, ratio, own, rope);
        }
        arrange_rope(rope, a[0]);
        start_qk<Values::F16, Sum::SET>(q, NOPE_BLOCKS, a[0], s);
    } else if (has_codes) {
        result = scales_of_fp4(row, t, logit_scale);
    } else {
        result = load_scales_of_32(row, t, logit_scale, ratio);
    }
    if constexpr (EXPAND) {
#pragma unroll
        for (int k = 0; k < RATIO_WORDS; ++k) broadcast_rows(result.ratio[k], ratio[k]);
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        uint32_t (&buffer)[4][4] = a[(block + 1) % 2];
        if (block < NOPE_BLOCKS) {
            if (has_codes) bytes = expand_block(codes);
            widen_bytes(bytes, ratio[block / SCALE_BLOCKS], buffer);
        } else {
            widen_bytes<false>(bytes, ratio[0], buffer);
        }
        const Bytes expanded = bytes;
        if (block + 1 < BLOCKS) load(block + 1);
        if (has_codes && block < NOPE_BLOCKS) store_block(row, t, block, expanded);
        if (block == 0 && !HAS_ROPE) {
            start_qk<Values::F16, Sum::SET>(q, block, buffer, s);
        } else {
            start_qk<Values::F16, Sum::ADD>(q, block, buffer, s);
        }
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    if constexpr (HAS_ROPE && !FP4) {
#pragma unroll
        for (int k = 0; k < RATIO_WORDS; ++k) result.ratio[k] = pack_f16x2(own[k][0], own[k][1]);
    }
    return result;
}

// PLAIN_FP8: the call's scale is a factor in `logit_scale`.
__device__ __forceinline__ void multiply_qk_plain(uint32_t row, int t, float (&s)[HEADS / 2]) {
    const uint32_t none[2] = {0, 0};
    const uint64_t q = q_operand();
    uint32_t a[2][4][4];
    Bytes bytes = load_block(row, t, 0);
    widen_bytes(bytes, none, a[0]);
    bytes = load_block(row, t, 1);
    start_qk<Values::F16, Sum::SET>(q, 0, a[0], s);
#pragma unroll
    for (int block = 1; block < Q_BLOCKS; ++block) {
        widen_bytes(bytes, none, a[block % 2]);
        if (block + 1 < Q_BLOCKS) bytes = load_block(row, t, block + 1);
        start_qk<Values::F16, Sum::ADD>(q, block, a[block % 2], s);
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
}

// S^T of the tile whose first stage is `stage`, which has arrived. Each warp multiplies its 16 rows. S^T is masked
// where a line does not see a row. `stages`: the split's stages before the tile.
__device__ __forceinline__ RowScales multiply_qk(const AttentionParams& p, const Role& r, uint32_t stage,
                                                 uint32_t stages, float logit_scale, float (&s)[HEADS / 2]) {
    stage += r.warp;
    const uint32_t row = stage_address(stage) + row_offset(r.g);
    RowScales scales;
    if constexpr (FLOAT_SCALES) {
        scales = multiply_qk_float_scales(r, row, stage, logit_scale, s);
    } else if constexpr (FINE_SCALES) {
        const bool of_extra = FP4_EXTRA && small().marks[place_of(stage)] & EXTRA_TILE;
        scales = multiply_qk_fine_scales(row, r.t, of_extra, logit_scale, s);
    } else {
        multiply_qk_plain(row, r.t, s);
        scales = {{1.0f, 1.0f}, {logit_scale, logit_scale}, {}};
    }
    const uint32_t marks = small().marks[place_of(stage)];
    if (!all_rows_visible(marks)) mask_rows(p, r, stages, marks, logit_scale < 0.0f ? INF : -INF, s);
    return scales;
}
