// Quantization to e4m3 under a scale, and back, and the scale itself. Results have the same bits as those of the
// formats' own writers.
#pragma once
#include "ptx/arithmetic.cuh"
#include "ptx/convert.cuh"
#include "rows/chunk.cuh"

constexpr float E4M3_MAX = 448.0f;
constexpr float AMAX_FLOOR = 1e-4f;  // least amax for power-of-two scales

// amax / 448, rounded as a division rounds it, for amax a bf16 or AMAX_FLOOR. All of these were tried: only quotients
// below the least normal float32 may differ. NaN stays NaN.
__device__ __forceinline__ float scale_from_amax(float amax) {
    const float scale = divide_by_constant(amax, E4M3_MAX);
    return amax < INF ? scale : amax;
}

// The smallest power of two that is not below x; x is normal or infinite.
__device__ __forceinline__ float power_of_two_from(float x) {
    const uint32_t bits = __float_as_uint(x);
    return __uint_as_float((bits + 0x7fffffu) & 0xff800000u);
}

// The largest magnitude of the even values of eight bf16, and of the odd ones, in the halves of a word. NaN is
// ignored.
__device__ __forceinline__ uint32_t amax_pair(const Vec16& v) {
    return max_bf16x2(max_bf16x2(abs_bf16x2(v.x), abs_bf16x2(v.y)), max_bf16x2(abs_bf16x2(v.z), abs_bf16x2(v.w)));
}

// The largest magnitudes of two scale tiles at once. LANES neighbouring lanes pass eight bf16 of each tile. The result
// is a bf16 for the first tile in the low half, and one for the second in the high half. It is NaN if all values are
// NaN.
template <int LANES>
__device__ __forceinline__ uint32_t tile_amax(const Vec16& first, const Vec16& second) {
    const uint32_t a = amax_pair(first), b = amax_pair(second);
    uint32_t amax = max_bf16x2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) amax = max_bf16x2(amax, __shfl_xor_sync(~0u, amax, step));
    return amax;
}

// Eight bf16 to float32.
__device__ __forceinline__ void widen_8(const Vec16& v, float (&to)[CHUNK]) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = bf16_low(w[i]);
        to[2 * i + 1] = bf16_high(w[i]);
    }
}

// Eight float32 to e4m3 bytes, in order.
__device__ __forceinline__ Vec8 pack_e4m3_8(const float (&v)[CHUNK]) {
    return {float_to_e4m3x4(v[0], v[1], v[2], v[3]), float_to_e4m3x4(v[4], v[5], v[6], v[7])};
}

// Four e4m3 bytes with the signs of four bf16, but NaN stays 0x7f.
__device__ __forceinline__ uint32_t with_signs(uint32_t codes, uint32_t low, uint32_t high) {
    const uint32_t nan = (codes & 0x7f7f7f7fu) + 0x01010101u;  // the highest bit of each byte
    return codes | (__byte_perm(low, high, 0x7531) & ~nan & 0x80808080u);
}

// Whether a scale is 0. A float comparison would flush subnormals, and say yes for them, too.
__device__ __forceinline__ bool is_zero(float scale) { return (__float_as_uint(scale) & 0x7fffffffu) == 0; }

// The codes, or zeros if the scale is 0: writers may have left NaN there.
__device__ __forceinline__ Vec8 codes_under(const Vec8& codes, float scale) {
    return is_zero(scale) ? Vec8{0, 0} : codes;
}

// Eight e4m3 bytes times a scale, to eight bf16.
__device__ __forceinline__ Vec16 dequantize_8(const Vec8& codes, float scale) {
    float lo[4], hi[4];
    e4m3x4_to_float(codes.x, lo);
    e4m3x4_to_float(codes.y, hi);
    return {pack_bf16x2(lo[0] * scale, lo[1] * scale), pack_bf16x2(lo[2] * scale, lo[3] * scale),
            pack_bf16x2(hi[0] * scale, hi[1] * scale), pack_bf16x2(hi[2] * scale, hi[3] * scale)};
}

// Eight bf16 divided by the scale of their scale tile, as e4m3, with the bytes of a correctly rounded float32
// division.
//
// The quotient is a product with the reciprocal, corrected by its remainder; the product alone is wrong where x /
// scale is a tie. Very small and very large scales are first brought to the middle of the range.
//
// This was tried on the CPU, with subnormals flushed to zero as the compiler's options have it, and with reciprocals
// that are wrong by up to two units in the last place, as rcp.approx may be. All scales amax / 448 of at least 2^-126
// were tried (amax a finite bf16 or AMAX_FLOOR), and the powers of two above these, each with all bf16 x up to amax.
// Of 5.3e9 bytes none differs.
//
// Under an infinite scale numbers become 0 and infinities NaN. NaN is 0x7f. The corrected quotient of -0 is +0, so the
// sign bits are set separately.
// SATURATES: the scale does not follow from the values, so quotients may be infinite; these become +-448.
template <bool SATURATES = false>
__device__ __forceinline__ Vec8 quantize_8(const Vec16& x, float scale) {
    float v[CHUNK];
    widen_8(x, v);
    if (!(scale >= 0x1p-64f && scale <= 0x1p64f)) {
        const float factor = scale < 1.0f ? 0x1p64f : scale < INF ? 0x1p-64f : 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) v[i] = multiply_exactly(v[i], factor);
        scale = scale < INF ? scale * factor : 1.0f;
    }
    const float reciprocal = reciprocal_approx(scale);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        const float q = v[i] * reciprocal;
        const bool infinite = SATURATES && fabsf(q) == INF;  // its remainder is NaN
        v[i] = infinite ? q : fmaf(fmaf(-q, scale, v[i]), reciprocal, q);
    }
    const Vec8 codes = pack_e4m3_8(v);
    return {with_signs(codes.x, x.x, x.y), with_signs(codes.y, x.z, x.w)};
}
