// Of fp8_sm90: Q in the order of the products, S^T = K . Q^T, and the softmax.
#pragma once
#if DENSE
#include "attention/fp8_sm90/request_rows.cuh"
#else
#include "attention/fp8_sm90/list_rows.cuh"
#endif
#include "ptx/arithmetic.cuh"
#include "ptx/matrix.cuh"
#include "ptx/wgmma.cuh"

// --- Q --------------------------------------------------------------------------------------------------------

// Column blocks 2 n and 2 n + 1 of Q hold columns 128 n .. + 127: each has 64 of them for itself, or they share them.
__device__ __forceinline__ bool are_alone(int n) { return PAIRED || n >= D_NOPE / 128; }

// In multiply_qk, k = 16 i + 2 t + e (e = 0, 1) is what thread t holds as item 4 i + e of a row's columns, 8 further
// item 4 i + 2 + e. So word t of chunk 4 half + k of a head's line is word k of the eight columns from
//   128 n + 32 t + 16 odd + 8 half  in block 2 n + odd, where two share columns,
//   64 block + 16 t + 8 half        in a block that is alone.
// A thread takes all t and k of a head, a half and several blocks, so that it stores 16 bytes at a time. Of the ninth
// block it takes T_OF_LAST of the four t.
struct QPart {
    int head, half, odd, last_t;
};
constexpr int T_OF_LAST = HEADS / 32;
constexpr bool NINTH = Q_BLOCKS == 9;

// The loads and the stores of eight lanes meet all banks: two halves of heads that are in four groups (raw_q) and in
// lines that are swizzled in four ways. So do stores of less than 16 bytes, as every eight lanes have another last_t.
__device__ __forceinline__ QPart q_part(const Role& r) {
    const int i = r.lane / 2 % 4, eight = r.lane / 8, group = (i ^ eight) + r.warp % 2 * 4;
    QPart part;
    part.head = group * GROUP_HEADS + i + r.warp / 2 % (HEADS / 32) * 4;
    part.half = r.lane % 2;
    part.odd = r.warpgroup;
    part.last_t = ((r.warpgroup * (64 / HEADS) + r.warp / 2 % (64 / HEADS)) ^ eight) % (128 / HEADS) * T_OF_LAST;
    return part;
}

template <int WORDS>
__device__ __forceinline__ void store_shared(uint32_t to, const uint32_t (&x)[WORDS]) {
    if constexpr (WORDS == 4) store_shared_16(to, {x[0], x[1], x[2], x[3]});
    if constexpr (WORDS == 2) store_shared_8(to, {x[0], x[1]});
    if constexpr (WORDS == 1) store_shared_4(to, x[0]);
}

// Stores the columns of TS successive t, times `factor`, a pair of powers of two. `line` is where they go in the half's
// first chunk of column block 0; the swizzle makes that of chunk k line ^ 16 k.
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
        store_shared((line ^ (k << 4)) + block * LINES_BYTES, words);
    }
}

// The same of columns in e4m3, as they are.
template <int TS>
__device__ __forceinline__ void store_q_e4m3(uint32_t line, int block, const Vec8 (&columns)[TS]) {
    uint32_t words[4][TS];
#pragma unroll
    for (int t = 0; t < TS; ++t) {
        e4m3x4_to_f16x2(columns[t].x, words[0][t], words[1][t]);
        e4m3x4_to_f16x2(columns[t].y, words[2][t], words[3][t]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) store_shared((line ^ (k << 4)) + block * LINES_BYTES, words[k]);
}

// The largest of the magnitudes in `top` and in the columns. Signs are of no meaning.
template <int TS>
__device__ __forceinline__ uint32_t largest_bits(uint32_t top, const Vec16 (&columns)[TS]) {
#pragma unroll
    for (int t = 0; t < TS; ++t) {
        const Vec16& v = columns[t];
        top = max_abs_bf16x2(top, max_abs_bf16x2(max_abs_bf16x2(v.x, v.y), max_abs_bf16x2(v.z, v.w)));
    }
    return top;
}

// What a logit is multiplied with, of Q times 1 / `q_scale`.
__device__ __forceinline__ float logit_scale_of(const AttentionParams& p, float q_scale) {
    float scale = p.scale_log2 * q_scale;
    if (PLAIN) scale *= load_call_scale(p.k_scale);
    return scale == 0.0f ? 0x1p-120f : scale;  // times -inf that is still -inf
}

// Q in place, to f16 and in the order of multiply_qk. Returns what a logit is to be multiplied with.
__device__ __forceinline__ float load_q(const AttentionParams& p, int turn, const Attended& w, const Role& r) {
    constexpr int PAIRS = HEADS / 16;  // of column blocks, of which a thread has one block each
    static_assert(Q_BLOCKS * 64 == D_QK && (NINTH || Q_BLOCKS == 8), "");
    const QPart part = q_part(r);
    auto pair = [&](int i) { return i * (64 / HEADS) + r.warp / 2 % (64 / HEADS); };
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
    // Positive numbers are ordered as their bits are.
    top = __reduce_max_sync(~0u, larger_half(top));
    if (r.lane == 0) small().q_max[4 * r.warpgroup + r.warp] = __uint_as_float(top << 16);
    sync_consumers();
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) max = fmaxf(max, small().q_max[i]);
    const int exponent = int(__float_as_uint(max) >> 23) - 127;
    const int shift = exponent == 128 || max == 0.0f ? 0 : min(13 - exponent, 100);  // an infinity stays one
    // Heads that do not exist: whatever was there becomes zeros and NaN, which raise no reference.
    const uint32_t factor = is_there ? power_of_two_bf16x2(shift + 127) : 0;
    const uint32_t line = swizzled(shared_address(shared) + Q_AT, part.head, 4 * part.half);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) store_q(line + part.odd * LINES_BYTES, 2 * pair(i), columns[i], factor, true);
    if (NINTH) store_q(line + 4 * part.last_t, 8, last, factor, PLAIN || ROPE_CODED);
    return logit_scale_of(p, __uint_as_float(uint32_t(127 - shift) << 23));
}

// The same of Q in e4m3, which f16 holds as it is.
__device__ __forceinline__ float load_q_e4m3(const AttentionParams& p, int turn, const Attended& w, const Role& r) {
    constexpr int PAIRS = HEADS / 16;
    const QPart part = q_part(r);
    auto pair = [&](int i) { return i * (64 / HEADS) + r.warp / 2 % (64 / HEADS); };
    const uint32_t raw = raw_q(part.head, D_QK) + 8 * part.half;
    mbarrier_wait(shared_address(&small().q_full), turn & 1);
    const bool is_there = part.head < p.h_q - w.first_head;  // known now
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
    for (int i = 0; i < PAIRS; ++i) store_q_e4m3(line + part.odd * LINES_BYTES, 2 * pair(i), codes[i]);
    if (NINTH) store_q_e4m3(line + 4 * part.last_t, 8, last);
    return logit_scale_of(p, load_call_scale(p.q_scale));
}

// --- S^T ------------------------------------------------------------------------------------------------------

// The scales of a thread's two rows, g and g + 8 of its warp's stage: r, and scale / r as f16, both rows in a word, of
// chunks t, t + 4 ...; EXPAND: of those that the thread's bytes of a row are in, of column block after column block.
constexpr int RATIO_WORDS = ceil_div(CHUNKS, 4);
__device__ __forceinline__ int chunk_of_word(int t, int k) {
    if (!EXPAND) return t + 4 * k;
    return are_alone(k / 2) ? 4 * k + t : 4 * (k - k % 2) + 2 * t + k % 2;
}
struct RowScales {
    float r[2], logit[2];         // S^T times `logit` are the logits
    uint32_t ratio[RATIO_WORDS];  // not of PLAIN_FP8, whose r is 1
};

// What S^T is multiplied with where a row's `factor` is not in it. Not 0: times -inf that is still -inf.
__device__ __forceinline__ float scale_logits(float logit_scale, float factor) {
    const float scale = logit_scale * factor;
    return scale == 0.0f ? logit_scale : scale;
}

// Float32: a row's scales, none below LEAST_SCALE.
__device__ __forceinline__ void load_float_scales(uint32_t row, float (&scale)[4]) {
    const Vec16 v = load_shared_16(row + SCALES_AT);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const float x = __uint_as_float(words[c]);
        scale[c] = x < LEAST_SCALE ? LEAST_SCALE : x;  // a NaN stays one
    }
}

// 16 e4m3 of each of a thread's two rows: four steps of k.
struct Bytes {
    Vec16 x, y;
};

// Widens them to A operands. SCALED: times the f16 pairs `ratio`.
template <bool SCALED = FINE_SCALES>
__device__ __forceinline__ void widen_bytes(const Bytes& bytes, const uint32_t (&ratio)[2], uint32_t (&a)[4][4]) {
    const Vec16 &x = bytes.x, &y = bytes.y;
    const uint32_t words[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            e4m3x4_to_f16x2(words[row][i], a[i][row], a[i][row + 2]);
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

// Starts four steps of k against column block `block` of Q. SUM: whether the first of them sets S or adds.
template <Values VALUES, Sum SUM>
__device__ __forceinline__ void start_qk(uint64_t q, int block, const uint32_t (&a)[4][4], float (&s)[HEADS / 2]) {
    wgmma_fence();
    wgmma<VALUES, SUM, Major::K>(s, a[0], wgmma_further(q, block * LINES_BYTES));
#pragma unroll
    for (int i = 1; i < 4; ++i)
        wgmma<VALUES, Sum::ADD, Major::K>(s, a[i], wgmma_further(q, block * LINES_BYTES + 32 * i));
    wgmma_commit();
}

__device__ __forceinline__ void scale_rows(float (&s)[HEADS / 2], float x, float y) {
#pragma unroll
    for (int i = 0; i < HEADS / 2; ++i) s[i] *= i % 4 < 2 ? x : y;
}

// 16 values of a row's RoPE: words 2 i and 2 i + 1 for step i of k.
__device__ __forceinline__ void load_rope(uint32_t row, int t, uint32_t (&words)[8]) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
        const Vec16 v = load_shared_16(row + ROPE_AT + 16 * (2 * t + b));
        words[4 * b] = v.x, words[4 * b + 1] = v.y, words[4 * b + 2] = v.z, words[4 * b + 3] = v.w;
    }
}

// HAS_ROPE: stores it where it was, in the order of load_columns: of 16 columns the even ones, then the odd ones.
__device__ __forceinline__ void store_rope(uint32_t row, int t, const uint32_t (&words)[8]) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const uint32_t bytes = odd ? 0x7632 : 0x5410;
        store_shared_16(row + ROPE_AT + 16 * (2 * t + odd),
                        {__byte_perm(words[0], words[1], bytes), __byte_perm(words[2], words[3], bytes),
                         __byte_perm(words[4], words[5], bytes), __byte_perm(words[6], words[7], bytes)});
    }
}

// RoPE of two rows as A operands.
__device__ __forceinline__ void arrange_rope(const uint32_t (&rope)[2][8], uint32_t (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) a[i][row] = rope[row][2 * i], a[i][row + 2] = rope[row][2 * i + 1];
    }
}

// A thread's bytes of NoPE column block `block`.
__device__ __forceinline__ Bytes load_block(uint32_t row, int t, int block) {
    const uint32_t at =
        row + (!are_alone(block / 2) ? 128 * (block / 2) + 16 * (2 * t + block % 2) : 64 * block + 16 * t);
    return {load_shared_16(at), load_shared_16(at + 8 * STRIDE)};
}

// Below, bytes are loaded and widened for the column block after next while wgmma works.

// Whether the scale of chunk t of a row is 0.
__device__ __forceinline__ bool has_zero_scale(uint32_t row, int t) {
    return __uint_as_float(load_shared_4(row + SCALES_AT + 4 * t)) == 0.0f;
}

// Rare: chunk t of each of a thread's two rows becomes zeros in the ring if its scale is 0: what is stored there counts as
// 0, NaN too. `marks`: of the rows' stage. Rows that are not valid are zeros. All lanes of the warp call.
__device__ __forceinline__ void clear_under_zeros(uint32_t row, const Role& r, uint32_t marks) {
    __syncwarp();  // other lanes have read the row's first bytes, which they read again behind this
#pragma unroll 1
    for (int i = 0; i < 2; ++i, row += 8 * STRIDE) {
        const bool valid = marks >> valid_bit(r.g + 8 * i) & 1;
        if (!valid || !has_zero_scale(row, r.t)) continue;
#pragma unroll 1
        for (int at = 0; at < SCALE_TILE; at += 16) store_shared_16(row + SCALE_TILE * r.t + at, {0, 0, 0, 0});
    }
    __syncwarp();
}

// Float32 scales: S^T goes from one chunk's scale to the next one's.
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
        if (c == 3 && !HAS_ROPE) break;  // the last scale becomes a part of `logit`
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

// UE8M0 scales: sets r of row i from its biased exponent, NaN where that is 255, and returns it as it can be inverted.
__device__ __forceinline__ int set_exponent(RowScales& scales, int i, int exponent, float logit_scale) {
    const bool nan = exponent == 255;
    exponent = min(max(exponent, LEAST_EXPONENT), 253);
    scales.r[i] = nan ? __uint_as_float(0x7fffffffu) : power_of_two(exponent);
    scales.logit[i] = scale_logits(logit_scale, scales.r[i]);
    return exponent;
}

// The largest biased exponent of a row's RoPE, of which each lane of a quad has a part.
__device__ __forceinline__ int largest_exponent(const uint32_t (&rope)[8]) {
    uint32_t top = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) top = max_abs_bf16x2(top, rope[k]);
    top = max(top & 0x7fff, top >> 16 & 0x7fff);
    top = max(top, __shfl_xor_sync(~0u, top, 1));
    return int(max(top, __shfl_xor_sync(~0u, top, 2)) >> 7);
}
constexpr int ROPE_HEADROOM = 14;  // RoPE / r stays below 2^15

// RoPE of a row becomes f16 divided by r, whose biased exponent this is, in `rope` and in the ring.
__device__ __forceinline__ void divide_rope(uint32_t row, int t, int exponent, uint32_t (&rope)[8]) {
    const uint32_t inverse = power_of_two_bf16x2(254 - exponent);
#pragma unroll
    for (int k = 0; k < 8; ++k) rope[k] = bf16x2_to_f16x2(multiply_bf16x2(rope[k], inverse));
    store_rope(row, t, rope);
}

// Both rows' halves of f16 pairs, as pairs of their own.
__device__ __forceinline__ void part_rows(uint32_t both, uint32_t (&ratio)[2]) {
    ratio[0] = __byte_perm(both, 0, 0x1010);
    ratio[1] = __byte_perm(both, 0, 0x3232);
}

// V4_FP8: the scales of both rows, seven of 64 columns each. `ratio`: of columns 128 c + 32 t .. + 31, pairs of f16;
// `own`: of chunks t and t + 4. RoPE becomes f16 divided by r, in `rope` and in the ring.
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

// V41_FP8: the scales of both rows, sixteen of 32 columns each. A thread's own four, t, t + 4 ..., are those of its
// columns 128 c + 32 t .. + 31, which become pairs of f16 in `ratio`; FP4_EXTRA: twice in the result, for each column
// block, and not in `ratio`. Both rows' are computed at once, as bfloat16: a scale's byte is the exponent of one.
__device__ __forceinline__ RowScales load_scales_of_32(uint32_t row, int t, float logit_scale, uint32_t (*ratio)[2]) {
    const Vec16 x = load_shared_16(row + SCALES_AT), y = load_shared_16(row + 8 * STRIDE + SCALES_AT);
    const uint32_t words[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
    const uint32_t bytes = t + 256 * (4 + t);  // byte t of both
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
        if (!EXPAND) part_rows(result.ratio[k], ratio[k]);
    }
    return result;
}

// FP4 rows: of the e4m3 scales of both rows those that the thread's bytes of a row are under, as f16, which is exact.
// These are of columns 128 n + 32 t + 16 odd .. + 15; of a column block that is alone, 64 block + 16 t .. + 15.
__device__ __forceinline__ void load_scales_of_16(uint32_t row, int t, uint32_t (&own)[RATIO_WORDS]) {
    const uint32_t at = row + SCALES_AT, at_8 = at + 8 * STRIDE;
    if constexpr (SCALES_IN_FOURS) {  // number s stands at 8 (s % 4) + s / 4: 16 (t % 2) + 8 odd + 2 n + t / 2
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

// FP4 rows whose r is 1.
__device__ __forceinline__ RowScales scales_of_fp4(uint32_t row, int t, float logit_scale) {
    RowScales result = {{1.0f, 1.0f}, {logit_scale, logit_scale}, {}};
    load_scales_of_16(row, t, result.ratio);
    multiply_scales(result.ratio, E2M1_IN_E4M3, E2M1_IN_E4M3);
    return result;
}

// V4_NVFP4: RoPE becomes f16 divided by r, in `rope` and in the ring. So that it stays below 2^15, r may be above 1.
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
    multiply_scales(result.ratio, E2M1_IN_E4M3 * inverse[0], E2M1_IN_E4M3 * inverse[1]);
    return result;
}

// Scales of 64 columns or less: K is multiplied by scale / r where it is widened. `of_extra`: the rows are the extra
// cache's, where that counts (FP4_EXTRA).
__device__ __forceinline__ RowScales multiply_qk_fine_scales(uint32_t row, int t, bool of_extra, float logit_scale,
                                                             float (&s)[HEADS / 2]) {
    static_assert(!E8M0_SCALES || SCALE_TILE == (HAS_ROPE ? 64 : 32), "V4_FP8 or V41_FP8");
    constexpr int SCALE_BLOCKS = CHUNK_COLUMNS == 16 ? 1 : 2;  // column blocks of which a thread has one scale
    constexpr int BLOCKS = NOPE_BLOCKS + ROPE_CODED;
    const uint64_t q = q_operand();
    uint32_t ratio[ceil_div(NOPE_BLOCKS, SCALE_BLOCKS)][2], a[2][4][4];
    Bytes bytes = load_block(row, t, 0);
    RowScales result;
    float own[2][2];  // V4_FP8: they become `ratio` of the result behind the products, as registers allow
    if constexpr (HAS_ROPE) {
        uint32_t rope[2][8];
        if constexpr (FP4) {
            result = scales_of_fp4_and_rope(row, t, logit_scale, rope);
        } else {
            result = load_scales_of_64(row, t, logit_scale, ratio, own, rope);
        }
        arrange_rope(rope, a[0]);
        start_qk<Values::F16, Sum::SET>(q, NOPE_BLOCKS, a[0], s);
    } else if (FP4 || of_extra) {
        result = scales_of_fp4(row, t, logit_scale);
    } else {
        result = load_scales_of_32(row, t, logit_scale, ratio);
    }
    if constexpr (EXPAND) {
#pragma unroll
        for (int k = 0; k < RATIO_WORDS; ++k) part_rows(result.ratio[k], ratio[k]);
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        uint32_t (&buffer)[4][4] = a[(block + 1) % 2];
        if (block < NOPE_BLOCKS) {
            widen_bytes(bytes, ratio[block / SCALE_BLOCKS], buffer);
        } else {
            widen_bytes<false>(bytes, ratio[0], buffer);
        }
        if (block + 1 < BLOCKS) bytes = load_block(row, t, block + 1);
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

// PLAIN_FP8: the call's scale is part of `logit_scale`.
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

// S^T of the tile whose first stage is `stage`, which has come: each warp its 16 rows. What a line does not see will get
// a P of 0. `stages`: of the split, before the tile.
__device__ __forceinline__ RowScales multiply_qk(const AttentionParams& p, const Role& r, uint32_t stage,
                                                 uint32_t stages, float logit_scale, float (&s)[HEADS / 2]) {
    stage += r.warp;
    const uint32_t row = stage_address(stage) + row_offset(r.g);
    RowScales scales;
    if constexpr (FLOAT_SCALES) {
        scales = multiply_qk_float_scales(r, row, stage, logit_scale, s);
    } else if constexpr (FINE_SCALES) {
        const bool of_extra = FP4_EXTRA && small().marks[place_of(stage)] & OF_EXTRA;
        scales = multiply_qk_fine_scales(row, r.t, of_extra, logit_scale, s);
    } else {
        multiply_qk_plain(row, r.t, s);
        scales = {{1.0f, 1.0f}, {logit_scale, logit_scale}, {}};
    }
    const uint32_t marks = small().marks[place_of(stage)];
    if (!all_seen(marks)) mask_rows(p, r, stages, marks, logit_scale < 0.0f ? INF : -INF, s);
    return scales;
}

// --- softmax --------------------------------------------------------------------------------------------------

// Of 2 HALF values each half of the lanes, chosen by a bit of g, keeps HALF, combined from both halves.
template <int HALF, typename Combine>
__device__ __forceinline__ void share_values(float (&v)[OWN_HEADS], bool high, int distance, Combine combine) {
#pragma unroll
    for (int c = 0; c < HALF; ++c) {
        const float first = v[c], second = v[c + HALF];
        v[c] = combine(high ? second : first, __shfl_xor_sync(~0u, high ? first : second, distance));
    }
}

// Combines values of lanes with the same t until a thread has SUMS of them, of heads sum_head(r, 0), sum_head(r, 1) ...
template <typename Combine>
__device__ __forceinline__ void combine_lanes(const Role& r, float (&v)[OWN_HEADS], Combine combine) {
    if constexpr (SUMS < OWN_HEADS) {
        share_values<OWN_HEADS / 2>(v, r.g & 4, 16, combine);
        share_values<OWN_HEADS / 4>(v, r.g & 2, 8, combine);
        share_values<OWN_HEADS / 8>(v, r.g & 1, 4, combine);
    }
}
__device__ __forceinline__ void add_lanes(const Role& r, float (&v)[OWN_HEADS]) {
    combine_lanes(r, v, [](float x, float y) { return x + y; });
}
__device__ __forceinline__ int sum_head(const Role& r, int c) {
    return SUMS == OWN_HEADS ? r.head(c) : 2 * r.lane + c;
}

// References rise to the tile's largest logit + log2 r. O^T and sums so far are to be multiplied by `factor`. Rare.
__device__ __forceinline__ void raise_references(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2]) {
    Small& sm = small();
    const float log2_r[2] = {log2_approx(scales.r[0]), log2_approx(scales.r[1])};  // exact
    float tops[OWN_HEADS];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c)
        tops[c] =
            fmaxf(s[element(0, c)] * scales.logit[0] + log2_r[0], s[element(1, c)] * scales.logit[1] + log2_r[1]);
    combine_lanes(r, tops, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
    for (int c = 0; c < SUMS; ++c) {
        const float top = SUMS == OWN_HEADS ? rows_max(tops[c]) : tops[c];
        if (SUMS < OWN_HEADS || r.g == 0) sm.across[r.warpgroup][r.warp][sum_head(r, c)] = top;
    }
    sync_warpgroup(r);
    const int head = threadIdx.x % WARPGROUP;
    if (head < HEADS) {
        const float (&of_warps)[4][HEADS] = sm.across[r.warpgroup];
        const float old = sm.ref[head];
        const float top =
            fmaxf(fmaxf(of_warps[0][head], of_warps[1][head]), fmaxf(of_warps[2][head], of_warps[3][head]));
        const float to = fmaxf(old, top - HEADROOM);
        sm.ref[head] = to;
        sm.factor[r.warpgroup][head] = exp2_approx(old - to);
    }
    sync_warpgroup(r);
}

// Stores a row's ratios, each quad those of its row, where load_columns reads them: those of a thread's four of 16
// rows stand side by side.
__device__ __forceinline__ void store_ratios(const Role& r, const RowScales& scales) {
    if (PLAIN) return;
    Small& sm = small();
    const int place = 16 * r.warp + r.g / 2 * 4 + r.g % 2;  // of row g; that of row g + 8 is two further
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int k = 0; k < RATIO_WORDS; ++k) {
            if (CHUNKS % 4 == 0 || k < CHUNKS / 4 || r.t < CHUNKS % 4)
                sm.ratio[r.warpgroup][chunk_of_word(r.t, k)][place + 2 * i] = uint16_t(scales.ratio[k] >> 16 * i);
        }
    }
}

// P^T = r 2^(logit - ref) to shared memory, rounded. `sums` gets the sums of P^T / r. Returns true if a value is above
// MAX_P.
__device__ __forceinline__ bool store_p(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2],
                                        float (&sums)[OWN_HEADS]) {
    // Line = head, chunk = eight rows.
    const int line = r.lane % 8 + r.lane / 16 * 8, chunk = 2 * r.warp + r.lane / 8 % 2;
    const uint32_t to = swizzled(shared_address(shared) + P_AT + r.warpgroup * LINES_BYTES, line, chunk);
    float2 refs[HEADS / 8];  // loaded all at once, or each would wait behind the stores before it
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) refs[j] = *reinterpret_cast<const float2*>(&small().ref[r.head(2 * j)]);
    uint32_t top = 0, rounded[2][2];
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        const float2 ref = refs[j];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float x = exp2_approx(fmaf(s[4 * j + 2 * i], scales.logit[i], -ref.x));
            const float y = exp2_approx(fmaf(s[4 * j + 2 * i + 1], scales.logit[i], -ref.y));
            sums[2 * j] = i == 0 ? x : sums[2 * j] + x;
            sums[2 * j + 1] = i == 0 ? y : sums[2 * j + 1] + y;
            rounded[j % 2][i] = pack_f16x2(x * scales.r[i], y * scales.r[i]);
            top = max_f16x2(top, rounded[j % 2][i]);
        }
        if (j % 2 == 1)
            stmatrix_x4_trans(to + (j - 1) * 1024, rounded[0][0], rounded[0][1], rounded[1][0], rounded[1][1]);
    }
    return larger_half(top) > MAX_P;
}

// S^T of one of this warpgroup's tiles becomes P^T and is published. `sums` gets what this thread's rows add to
// denominators. P^T is computed with the references as they are; before the `first` tile of a split there are none. In
// the rare case that they are too low, they rise, P^T is computed again, and the function returns true.
__device__ __forceinline__ bool softmax_tile(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2],
                                             float (&sums)[OWN_HEADS], bool first) {
    store_ratios(r, scales);
    if (first) raise_references(rare_role(r), scales, s);
    const bool too_large = store_p(r, scales, s, sums);
    fence_proxy_async();
    const bool raised = named_barrier_any(WARPGROUP_SYNC + r.warpgroup, WARPGROUP, too_large);
    if (raised) {
        raise_references(rare_role(r), scales, s);
        store_p(r, scales, s, sums);
        fence_proxy_async();
    }
    if (threadIdx.x % WARPGROUP == 0) small().raised[r.warpgroup] = raised;
    if (raised) sync_warpgroup(r);
    named_barrier_arrive(P_READY + r.warpgroup, CONSUMERS);
    return raised;
}
