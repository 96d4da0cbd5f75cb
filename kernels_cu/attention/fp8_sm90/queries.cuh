// Part of fp8_sm90: Q becomes f16, in the order in which multiply_qk takes its columns.
#pragma once
#if DENSE
#include "attention/fp8_sm90/request_rows.cuh"
#else
#include "attention/fp8_sm90/list_rows.cuh"
#endif
#include "ptx/arithmetic.cuh"

// Column blocks 2 n and 2 n + 1 of Q hold columns 128 n .. 128 n + 127. If the blocks "are alone", each has 64
// neighbouring columns; else they take 16 columns in turn.
__device__ __forceinline__ bool are_alone(int n) { return PAIRED || n >= D_NOPE / 128; }

// The order of columns. In multiply_qk thread t of a quad loads 16 neighbouring items of a row. It uses items 4 i + e
// (e = 0, 1) as k = 16 i + 2 t + e, and items 4 i + 2 + e as k = 16 i + 2 t + 8 + e. So word t of chunk 4 half + k of
// a head's line in Q holds word k of the eight columns that begin with
//   128 n + 32 t + 16 odd + 8 half  in block 2 n + odd of a pair,
//   64 block + 16 t + 8 half        in a block that is alone.
// A thread takes all t and k of a head and a half, in several blocks, so that it stores 16 bytes at a time. Of the
// ninth block it takes only T_OF_LAST of the four t; with 16 heads warpgroup 0 takes all of it.
struct QPart {
    int head, half, odd, last_t;
};
// Column blocks come in pairs. A thread takes one block of each of PAIRS pairs, which are PAIRS_APART pairs apart.
constexpr int PAIRS = HEADS / 16, PAIRS_APART = 64 / HEADS;
__device__ __forceinline__ int first_pair(const Role& r) { return (HEADS == 16 ? r.warp : r.warp / 2) % PAIRS_APART; }
constexpr int T_OF_LAST = HEADS < 32 ? 1 : HEADS / 32;
constexpr bool NINTH = Q_BLOCKS == 9;

// Which part of Q a thread takes. It is chosen such that the loads and the stores of eight lanes hit all banks: these
// lanes have two halves of heads in four groups (raw_q) and in lines with four different swizzles. Stores of less than
// 16 bytes hit all banks, too, because each eight lanes have another last_t.
__device__ __forceinline__ QPart q_part(const Role& r) {
    const int i = r.lane / 2 % 4, eight = r.lane / 8, group = (i ^ eight) + r.warp % 2 * 4;
    QPart part;
    if constexpr (HEADS == 16) {
        part.head = 2 * (i + eight / 2 * 4) + (i / 2 ^ eight % 2);
    } else {
        part.head = group * GROUP_HEADS + i + r.warp / 2 % (HEADS / 32) * 4;
    }
    part.half = r.lane % 2;
    part.odd = r.warpgroup;
    part.last_t = ((r.warpgroup * PAIRS_APART + first_pair(r)) ^ eight) % (4 / T_OF_LAST) * T_OF_LAST;
    return part;
}

__device__ __forceinline__ bool has_last(const QPart& part) { return HEADS > 16 || part.odd == 0; }

template <int WORDS>
__device__ __forceinline__ void store_shared(uint32_t to, const uint32_t (&x)[WORDS]) {
    if constexpr (WORDS == 4) store_shared_16(to, {x[0], x[1], x[2], x[3]});
    if constexpr (WORDS == 2) store_shared_8(to, {x[0], x[1]});
    if constexpr (WORDS == 1) store_shared_4(to, x[0]);
}

// Stores the columns of TS successive t as f16 (or, without `f16`, bfloat16), times `factor`, a pair of powers of two.
// `line` is where they go in the half's first chunk of column block 0. The swizzle moves those of chunk k to line ^ 16
// k.
template <int TS>
__device__ __forceinline__ void store_q(uint32_t line, int block, const Vec16 (&columns)[TS], uint32_t factor,
                                        bool f16) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        uint32_t words[TS];
#pragma unroll
        for (int t = 0; t < TS; ++t) {
            const Vec16& v = columns[t];
            const uint32_t scaled = multiply_bf16x2(k < 2 ? (k == 0 ? v.x : v.y) : (k == 2 ? v.z : v.w), factor);
            words[t] = f16 ? bf16x2_to_f16x2(scaled) : scaled;
        }
        store_shared((line ^ (k << 4)) + block * HEADS_BLOCK_BYTES, words);
    }
}

// The same for e4m3 columns, without a factor.
template <int TS>
__device__ __forceinline__ void store_q_e4m3(uint32_t line, int block, const Vec8 (&columns)[TS]) {
    uint32_t words[4][TS];
#pragma unroll
    for (int t = 0; t < TS; ++t) {
        e4m3x4_to_f16x2(columns[t].x, words[0][t], words[1][t]);
        e4m3x4_to_f16x2(columns[t].y, words[2][t], words[3][t]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) store_shared((line ^ (k << 4)) + block * HEADS_BLOCK_BYTES, words[k]);
}

// The largest magnitude of `top` and the columns. Sign bits of `top` and of the result mean nothing.
template <int TS>
__device__ __forceinline__ uint32_t largest_bits(uint32_t top, const Vec16 (&columns)[TS]) {
#pragma unroll
    for (int t = 0; t < TS; ++t) {
        const Vec16& v = columns[t];
        top = max_abs_bf16x2(top, max_abs_bf16x2(max_abs_bf16x2(v.x, v.y), max_abs_bf16x2(v.z, v.w)));
    }
    return top;
}

// The factor of logits, where Q was divided by `q_scale`.
__device__ __forceinline__ float logit_scale_of(const AttentionParams& p, float q_scale) {
    float scale = p.scale_log2 * q_scale;
    if (PLAIN) scale *= load_call_scale(p.k_scale);
    return scale == 0.0f ? 0x1p-120f : scale;  // times -inf that is still -inf
}

// The exponent of the power of two that brings a Q, whose largest magnitude is `max`, to 2^13 .. 2^14.
__device__ __forceinline__ int q_shift(float max) {
    const int exponent = int(__float_as_uint(max) >> 23) - 127;
    return exponent == 128 || max == 0.0f ? 0 : min(13 - exponent, 100);  // infinities stay infinite
}

// Turns Q in shared memory into f16 in the order of multiply_qk, in its place. Returns the factor of logits.
__device__ __forceinline__ float load_q(const AttentionParams& p, int turn, const TurnInfo& w, const Role& r) {
    static_assert(Q_BLOCKS * 64 == D_QK && (NINTH || Q_BLOCKS == 8), "");
    const QPart part = q_part(r);
    auto pair = [&](int i) { return i * PAIRS_APART + first_pair(r); };
    const uint32_t raw = raw_q(part.head, 2 * D_QK) + 16 * part.half;
    mbarrier_wait(shared_address(&small().q_full), turn & 1);
    Vec16 columns[PAIRS][4], last[T_OF_LAST];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const bool alone = are_alone(pair(i));
        const uint32_t from = raw + 256 * pair(i) + (alone ? 128 : 32) * part.odd;
#pragma unroll
        for (int t = 0; t < 4; ++t) columns[i][t] = load_shared_16(from + (alone ? 32 : 64) * t);
    }
#pragma unroll
    for (int t = 0; NINTH && t < T_OF_LAST; ++t) last[t] = load_shared_16(raw + 128 * 8 + 32 * (part.last_t + t));
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) top = largest_bits(top, columns[i]);
    if (NINTH) top = largest_bits(top, last);
    const bool is_there = part.head < p.h_q - w.first_head;
    if (!is_there) top = 0;
    top &= 0x7fff7fff;
    // Positive floats compare as their bits do.
    top = __reduce_max_sync(~0u, larger_half(top));
    if (r.lane == 0) small().q_max[4 * r.warpgroup + r.warp] = __uint_as_float(top << 16);
    sync_consumers();
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) max = fmaxf(max, small().q_max[i]);
    const int shift = q_shift(max);
    // Heads that do not exist: whatever is in their space becomes zeros or NaN, and neither raises a reference.
    const uint32_t factor = is_there ? power_of_two_bf16x2(shift + 127) : 0;
    const uint32_t line = swizzled(shared_address(shared) + Q_AT, part.head, 4 * part.half);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
        store_q(line + part.odd * HEADS_BLOCK_BYTES, 2 * pair(i), columns[i], factor, true);
    // E5M2: logits are multiplied by 2^7, but K's RoPE does not lack that factor. So Q's RoPE is multiplied by 2^-7.
    const uint32_t factor_of_last = is_there ? power_of_two_bf16x2(shift + 127 - FP4_EXPONENT) : 0;
    if (NINTH && has_last(part)) store_q(line + 4 * part.last_t, 8, last, factor_of_last, PLAIN || ROPE_CODED);
    return logit_scale_of(p, __uint_as_float(uint32_t(127 - shift) << 23));
}

// The same for an e4m3 Q, which needs no factor.
__device__ __forceinline__ float load_q_e4m3(const AttentionParams& p, int turn, const TurnInfo& w, const Role& r) {
    const QPart part = q_part(r);
    auto pair = [&](int i) { return i * PAIRS_APART + first_pair(r); };
    const uint32_t raw = raw_q(part.head, D_QK) + 8 * part.half;
    mbarrier_wait(shared_address(&small().q_full), turn & 1);
    const bool is_there = part.head < p.h_q - w.first_head;  // `w` is valid once q_full is complete
    auto load = [&](uint32_t from) { return is_there ? load_shared_8(from) : Vec8{0, 0}; };
    Vec8 codes[PAIRS][4], last[T_OF_LAST];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
#pragma unroll
        for (int t = 0; t < 4; ++t)
            codes[i][t] = load(raw + 128 * pair(i) + (PAIRED ? 64 : 16) * part.odd + (PAIRED ? 16 : 32) * t);
    }
#pragma unroll
    for (int t = 0; NINTH && t < T_OF_LAST; ++t) last[t] = load(raw + 64 * 8 + 16 * (part.last_t + t));
    sync_consumers();
    const uint32_t line = swizzled(shared_address(shared) + Q_AT, part.head, 4 * part.half);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) store_q_e4m3(line + part.odd * HEADS_BLOCK_BYTES, 2 * pair(i), codes[i]);
    if (NINTH && has_last(part)) store_q_e4m3(line + 4 * part.last_t, 8, last);
    return logit_scale_of(p, load_call_scale(p.q_scale));
}
