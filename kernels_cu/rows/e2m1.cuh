// e2m1: codes of four bits, a sign bit above the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6. Eight codes are a word, the
// first in the lowest bits.
#pragma once
#include "ptx/convert.cuh"
#include "rows/chunk.cuh"

// The largest magnitude of LANES neighbouring lanes' eight bf16 each, as a bf16; NaN if any value is NaN.
template <int LANES>
__device__ __forceinline__ uint32_t amax_or_nan(const Vec16& v) {
    uint32_t amax = max_or_nan_bf16x2(max_or_nan_bf16x2(abs_bf16x2(v.x), abs_bf16x2(v.y)),
                                      max_or_nan_bf16x2(abs_bf16x2(v.z), abs_bf16x2(v.w)));
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) amax = max_or_nan_bf16x2(amax, __shfl_xor_sync(~0u, amax, step));
    return larger_half(amax);
}

// The value of a code; only the lowest four bits count.
__device__ __forceinline__ float e2m1_to_float(uint32_t code) {
    const uint32_t exponent = code >> 1 & 3, fraction = code & 1;
    const float magnitude = exponent == 0 ? 0.5f * fraction : __uint_as_float(exponent + 126 << 23 | fraction << 22);
    return code & 8 ? -magnitude : magnitude;
}

// Joins eight codes, which are in the lowest bits of the halves of four words, to one word.
__device__ __forceinline__ uint32_t join_codes(const uint32_t (&two)[4]) {
    uint32_t byte[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) byte[i] = two[i] | two[i] >> 12;
    return __byte_perm(__byte_perm(byte[0], byte[1], 0x0040), __byte_perm(byte[2], byte[3], 0x0040), 0x5410);
}

// Eight codes as e5m2 bytes, in their order. The code s eem becomes s000eem0, the upper byte of an f16 that is 2^-14
// of its value.
constexpr float E2M1_IN_E5M2 = 0x1p14f;  // factor from such a byte to the code's value
__device__ __forceinline__ Vec8 e2m1_to_e5m2_8(uint32_t codes) {
    // For even codes, 2 (8 s + eem) + 0x70 is 0x80 s + 2 eem, with bits 4 to 6 set in addition or not; the mask clears
    // them.
    const uint32_t even = (codes & 0x0f0f0f0f) * 2 + 0x70707070 & 0x8e8e8e8e;
    const uint32_t odd = (codes >> 3 & 0x0e0e0e0e) | (codes & 0x80808080);
    return {__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)};
}

// Eight codes as e4m3 bytes, in their order. The code s eem becomes s00eem00, 2^-6 of its value, which is exact for
// subnormals, too.
constexpr float E2M1_IN_E4M3 = 0x1p6f;  // factor from such a byte to the code's value
__device__ __forceinline__ Vec8 e2m1_to_e4m3_8(uint32_t codes) {
    // For even codes, 4 (8 s + eem) + 0x60 is 0x80 s + 4 eem, with bits 5 and 6 set in addition or not; the mask
    // clears them.
    const uint32_t even = (codes & 0x0f0f0f0f) * 4 + 0x60606060 & 0x9c9c9c9c;
    const uint32_t odd = (codes >> 2 & 0x1c1c1c1c) | (codes & 0x80808080);
    return {__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)};
}
