// Part of fp8_sm90: r and scale / r of rows (fp8_sm90.cu), and RoPE divided by r.
#pragma once
#include "attention/fp8_sm90/queries.cuh"

// The scales of a thread's two rows, g and g + 8 of its warp's stage. `ratio`: scale / r as f16, both rows in a word,
// of chunks t, t + 4, ...; EXPAND: of the chunks that hold the thread's bytes of a row, column block by column block.
constexpr int RATIO_WORDS = ceil_div(CHUNKS, 4);
__device__ __forceinline__ int chunk_of_word(int t, int k) {
    if (!EXPAND) return t + 4 * k;
    return are_alone(k / 2) ? 4 * k + t : 4 * (k - k % 2) + 2 * t + k % 2;
}
struct RowScales {
    float r[2], logit[2];         // logits are S^T times `logit`
    uint32_t ratio[RATIO_WORDS];  // not used for PLAIN_FP8, whose r is 1
};

// The factor that makes logits of a row's S^T, where S^T lacks the row's `factor`. Never 0, so that a masked -inf
// stays -inf.
__device__ __forceinline__ float scale_logits(float logit_scale, float factor) {
    const float scale = logit_scale * factor;
    return scale == 0.0f ? logit_scale : scale;
}

// Float32 scales of a row, raised to LEAST_SCALE at least.
__device__ __forceinline__ void load_float_scales(uint32_t row, float (&scale)[4]) {
    const Vec16 v = load_shared_16(row + SCALES_AT);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const float x = __uint_as_float(words[c]);
        scale[c] = x < LEAST_SCALE ? LEAST_SCALE : x;  // a NaN stays one
    }
}

// Loads 16 values of a row's RoPE: words 2 i and 2 i + 1 are for step i of k.
__device__ __forceinline__ void load_rope(uint32_t row, int t, uint32_t (&words)[8]) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
        const Vec16 v = load_shared_16(row + ROPE_AT + 16 * (2 * t + b));
        words[4 * b] = v.x, words[4 * b + 1] = v.y, words[4 * b + 2] = v.z, words[4 * b + 3] = v.w;
    }
}

// HAS_ROPE: stores them back to their place, in the order that load_columns wants: of each 16 columns the even ones,
// then the odd ones.
__device__ __forceinline__ void store_rope(uint32_t row, int t, const uint32_t (&words)[8]) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const uint32_t bytes = odd ? 0x7632 : 0x5410;
        store_shared_16(row + ROPE_AT + 16 * (2 * t + odd),
                        {__byte_perm(words[0], words[1], bytes), __byte_perm(words[2], words[3], bytes),
                         __byte_perm(words[4], words[5], bytes), __byte_perm(words[6], words[7], bytes)});
    }
}

// Whether the scale of chunk t of a row is 0.
__device__ __forceinline__ bool has_zero_scale(uint32_t row, int t) {
    return __uint_as_float(load_shared_4(row + SCALES_AT + 4 * t)) == 0.0f;
}

// Rare. Sets chunk t of each of the thread's two rows to zeros in the ring if its scale is 0: what stands there counts
// as 0, even NaN. `marks`: of the rows' stage; rows that are not valid are zeros already. All lanes of the warp call.
__device__ __forceinline__ void clear_under_zeros(uint32_t row, const Role& r, uint32_t marks) {
    __syncwarp();  // other lanes have loaded bytes of the row; they load them again after this function
#pragma unroll 1
    for (int i = 0; i < 2; ++i, row += 8 * STRIDE) {
        const bool valid = marks >> valid_bit(r.g + 8 * i) & 1;
        if (!valid || !has_zero_scale(row, r.t)) continue;
#pragma unroll 1
        for (int at = 0; at < SCALE_TILE; at += 16) store_shared_16(row + SCALE_TILE * r.t + at, {0, 0, 0, 0});
    }
    __syncwarp();
}

// Sets r of row i, a power of two, from its biased exponent; NaN where that is 255. Returns the exponent, limited so
// that r has an inverse.
__device__ __forceinline__ int set_exponent(RowScales& scales, int i, int exponent, float logit_scale) {
    const bool nan = exponent == 255;
    exponent = min(max(exponent, LEAST_EXPONENT), 253);
    scales.r[i] = nan ? __uint_as_float(0x7fffffffu) : power_of_two(exponent);
    scales.logit[i] = scale_logits(logit_scale, scales.r[i]);
    return exponent;
}

// The largest biased exponent of a row's RoPE. Each lane of a quad passes its part of the row.
__device__ __forceinline__ int largest_exponent(const uint32_t (&rope)[8]) {
    uint32_t top = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) top = max_abs_bf16x2(top, rope[k]);
    top = max(top & 0x7fff, top >> 16 & 0x7fff);
    top = max(top, __shfl_xor_sync(~0u, top, 1));
    return int(max(top, __shfl_xor_sync(~0u, top, 2)) >> 7);
}
constexpr int ROPE_HEADROOM = 14;  // RoPE / r stays below 2^15

// Turns a row's RoPE into f16, divided by r, in `rope` and in the ring. `exponent`: the biased exponent of r.
__device__ __forceinline__ void divide_rope(uint32_t row, int t, int exponent, uint32_t (&rope)[8]) {
    const uint32_t inverse = power_of_two_bf16x2(254 - exponent);
#pragma unroll
    for (int k = 0; k < 8; ++k) rope[k] = bf16x2_to_f16x2(multiply_bf16x2(rope[k], inverse));
    store_rope(row, t, rope);
}

// Of a word with an f16 of each row, makes a pair of equal f16 for each row.
__device__ __forceinline__ void broadcast_rows(uint32_t both, uint32_t (&ratio)[2]) {
    ratio[0] = __byte_perm(both, 0, 0x1010);
    ratio[1] = __byte_perm(both, 0, 0x3232);
}

// V4_FP8: the scales of both rows, seven of 64 columns each. `ratio`: of columns 128 c + 32 t .. + 31, as pairs of
// f16. `own`: of chunks t and t + 4. RoPE becomes f16 divided by r, in `rope` and in the ring.
__device__ __forceinline__ RowScales load_scales_of_64(uint32_t row, int t, float logit_scale, uint32_t (*ratio)[2],
                                                       float (&own)[2][2], uint32_t (&rope)[2][8]) {
    RowScales result;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        load_rope(row + i * 8 * STRIDE, t, rope[i]);
        const Vec8 scales = load_shared_8(row + i * 8 * STRIDE + SCALES_AT);
        int exponent = largest_exponent(rope[i]) - ROPE_HEADROOM;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            exponent = max(exponent, int((c < 4 ? scales.x : scales.y) >> (c % 4 * 8) & 0xff));
        exponent = set_exponent(result, i, exponent, logit_scale);
        auto ratio_of = [&](int biased) { return power_of_two(max(biased - exponent + 127, 0)); };
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const uint32_t biased =
                c < 3 ? (c < 2 ? scales.x : scales.y) >> (16 * (c % 2) + t / 2 * 8) & 0xff : scales.y >> 16 & 0xff;
            const float f = ratio_of(biased);
            ratio[c][i] = pack_f16x2(f, f);
        }
        own[0][i] = ratio_of(scales.x >> 8 * t & 0xff);
        own[1][i] = ratio_of(scales.y >> 8 * t & 0xff);
        divide_rope(row + i * 8 * STRIDE, t, exponent, rope[i]);
    }
    return result;
}

// V41_FP8: the scales of both rows, sixteen of 32 columns each. A thread computes four of them, t, t + 4, ..., which
// belong to its columns 128 c + 32 t .. + 31, and returns them as pairs of f16 in `ratio`. FP4_EXTRA: they go into the
// result instead, twice, once for each column block. Both rows are computed at once, as bfloat16: a scale's byte is
// the exponent of one.
__device__ __forceinline__ RowScales load_scales_of_32(uint32_t row, int t, float logit_scale, uint32_t (*ratio)[2]) {
    const Vec16 x = load_shared_16(row + SCALES_AT), y = load_shared_16(row + 8 * STRIDE + SCALES_AT);
    const uint32_t words[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
    const uint32_t bytes = t + 256 * (4 + t);  // selects byte t of both rows
    uint32_t scales[4], top = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        scales[c] = (__byte_perm(words[0][c], words[1][c], bytes) & 0x00ff00ff) << 7;
        top = max_bf16x2(top, scales[c]);
    }
    top = max_bf16x2(top, __shfl_xor_sync(~0u, top, 1));
    top = max_bf16x2(top, __shfl_xor_sync(~0u, top, 2));
    RowScales result;
    const int of_g = set_exponent(result, 0, top >> 7 & 0xff, logit_scale);
    const int of_g_8 = set_exponent(result, 1, top >> 23, logit_scale);
    const uint32_t inverse = (254 - of_g) << 7 | (254 - of_g_8) << 23;
#pragma unroll
    for (int k = 0; k < RATIO_WORDS; ++k) {
        result.ratio[k] = bf16x2_to_f16x2(multiply_bf16x2(scales[4 * k / RATIO_WORDS], inverse));
        if (!EXPAND) broadcast_rows(result.ratio[k], ratio[k]);
    }
    return result;
}

// FP4 rows: the e4m3 scales of both rows, of the chunks that hold the thread's bytes, as f16, which is exact. These
// chunks are columns 128 n + 32 t + 16 odd .. + 15, or 64 block + 16 t .. + 15 of a column block that is alone.
__device__ __forceinline__ void load_scales_of_16(uint32_t row, int t, uint32_t (&own)[RATIO_WORDS]) {
    const uint32_t at = row + SCALES_AT, at_8 = at + 8 * STRIDE;
    if constexpr (SCALES_IN_FOURS) {  // scale s is byte 8 (s % 4) + s / 4: 16 (t % 2) + 8 odd + 2 n + t / 2
        const Vec16 x = load_shared_16(at + t % 2 * 16), y = load_shared_16(at_8 + t % 2 * 16);
        const uint32_t bytes = 0x6240 + t / 2 * 0x1111;
        e4m3x4_to_f16x2(__byte_perm(x.x, y.x, bytes), own[0], own[2]);
        e4m3x4_to_f16x2(__byte_perm(x.y, y.y, bytes), own[4], own[6]);
        e4m3x4_to_f16x2(__byte_perm(x.z, y.z, bytes), own[1], own[3]);
        e4m3x4_to_f16x2(__byte_perm(x.w, y.w, bytes), own[5], own[7]);
    } else {
#pragma unroll
        for (int n = 0; n < RATIO_WORDS / 2; ++n)
            e4m3x4_to_f16x2(
                __byte_perm(load_shared_2(at + 8 * n + 2 * t), load_shared_2(at_8 + 8 * n + 2 * t), 0x5140),
                own[2 * n], own[2 * n + 1]);
        if constexpr (RATIO_WORDS % 2 == 1) {
            constexpr int LAST = 4 * (RATIO_WORDS - 1);
            uint32_t none;
            e4m3x4_to_f16x2(__byte_perm(load_shared_byte(at + LAST + t), load_shared_byte(at_8 + LAST + t), 0x5140),
                            own[RATIO_WORDS - 1], none);
        }
    }
}

__device__ __forceinline__ void multiply_scales(uint32_t (&own)[RATIO_WORDS], float x, float y) {
    const uint32_t factors = pack_f16x2(x, y);
#pragma unroll
    for (int k = 0; k < RATIO_WORDS; ++k) own[k] = multiply_f16x2(own[k], factors);
}

// What scales are multiplied by, because expanded bytes are a fraction of the codes' values.
constexpr float CODE_FACTOR = E5M2 ? E2M1_IN_E5M2 / (1 << FP4_EXPONENT) : E2M1_IN_E4M3;

// FP4 rows without RoPE in bfloat16: r is 1.
__device__ __forceinline__ RowScales scales_of_fp4(uint32_t row, int t, float logit_scale) {
    const float logit = scale_logits(logit_scale, 1 << FP4_EXPONENT);
    RowScales result = {{1.0f, 1.0f}, {logit, logit}, {}};
    load_scales_of_16(row, t, result.ratio);
    multiply_scales(result.ratio, CODE_FACTOR, CODE_FACTOR);
    return result;
}

// V4_NVFP4: RoPE becomes f16 divided by r, in `rope` and in the ring. r is above 1 where RoPE would not stay below
// 2^15.
__device__ __forceinline__ RowScales scales_of_fp4_and_rope(uint32_t row, int t, float logit_scale,
                                                            uint32_t (&rope)[2][8]) {
    RowScales result;
    load_scales_of_16(row, t, result.ratio);
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        load_rope(row + i * 8 * STRIDE, t, rope[i]);
        const int exponent = set_exponent(result, i, max(largest_exponent(rope[i]) - ROPE_HEADROOM, 127), logit_scale);
        divide_rope(row + i * 8 * STRIDE, t, exponent, rope[i]);
        inverse[i] = inverse_power_of_two(exponent);
    }
    multiply_scales(result.ratio, CODE_FACTOR * inverse[0], CODE_FACTOR * inverse[1]);
    return result;
}
