// Values to e4m3 under a scale, and the scale itself, as the formats' writers compute them: to the bit.
#pragma once
#include "ptx/convert.cuh"
#include "tile/chunk.cuh"

constexpr float E4M3_MAX = 448.0f;
constexpr float AMAX_FLOOR = 1e-4f;  // keeps power-of-two scales from vanishing with a tile's values

// div.rn.f32, which flushes nothing to zero whatever the compiler's options.
__device__ __forceinline__ float divide_exactly(float a, float b) {
    float q;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
    return q;
}

// amax / 448 as a division rounds it, for amax a bf16 or AMAX_FLOOR: a product mended by its remainder. Tried for all
// of them; only quotients below the least normal float32 may differ, and NaN stays NaN. mul, fma: nothing is flushed.
__device__ __forceinline__ float scale_from_amax(float amax) {
    float scale;
    asm("{\n"
        ".reg .f32 q, rest;\n"
        "mul.rn.f32 q, %1, %2;\n"
        "fma.rn.f32 rest, q, %3, %1;\n"
        "fma.rn.f32 %0, rest, %2, q;\n"
        "}\n"
        : "=f"(scale)
        : "f"(amax), "f"(1.0f / E4M3_MAX), "f"(-E4M3_MAX));
    return amax < INF ? scale : amax;
}

// The smallest power of two that is not below x; x is normal or infinite.
__device__ __forceinline__ float power_of_two_from(float x) {
    const uint32_t bits = __float_as_uint(x);
    return __uint_as_float((bits + 0x7fffffu) & 0xff800000u);
}

// The largest magnitude of eight bf16 in either half of the result; NaN is left aside. max.bf16x2, abs.bf16x2.
__device__ __forceinline__ uint32_t amax_pair(const Vec16& v) {
    return max_bf16x2(max_bf16x2(abs_bf16x2(v.x), abs_bf16x2(v.y)), max_bf16x2(abs_bf16x2(v.z), abs_bf16x2(v.w)));
}

// The largest magnitudes of two tiles at once, each spread over LANES neighbouring lanes that pass eight bf16 of it:
// the first tile's as a bf16 in the low half, the second's in the high half. Only NaN gives NaN.
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

// Eight e4m3 bytes, in order.
__device__ __forceinline__ Vec8 pack_e4m3_8(const float (&v)[CHUNK]) {
    return {float_to_e4m3x4(v[0], v[1], v[2], v[3]), float_to_e4m3x4(v[4], v[5], v[6], v[7])};
}

// The sign bits of four bf16 as those of four bytes.
__device__ __forceinline__ uint32_t sign_bits(uint32_t low, uint32_t high) {
    return __byte_perm(low, high, 0x7531) & 0x80808080u;
}

// mul.rn.f32, which flushes nothing to zero either.
__device__ __forceinline__ float multiply_exactly(float a, float b) {
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}

// Eight bf16 divided by their tile's scale, as e4m3; the bytes are those of an exactly rounded float32 division.
//
// A product with the reciprocal, mended by its remainder, after very small and very large scales were brought to the
// middle. Tried on the CPU, with subnormals flushed to zero as the compiler's options have it, for every bf16 x up to
// amax and every scale that is amax / 448, amax a finite bf16 or AMAX_FLOOR, at least 2^-126, or the power of two from
// there, with reciprocals up to two units in the last place off, as rcp.approx may be: of 5.3e9 bytes none differs. The
// product alone fails where x / scale is a tie. Under an infinite scale numbers become 0 and infinities NaN. The mended
// quotient of -0 is +0, hence the signs.
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
        v[i] = fmaf(fmaf(-q, scale, v[i]), reciprocal, q);
    }
    const Vec8 codes = pack_e4m3_8(v);
    return {codes.x | sign_bits(x.x, x.y), codes.y | sign_bits(x.z, x.w)};
}
