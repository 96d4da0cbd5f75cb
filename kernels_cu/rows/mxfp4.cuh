// MXFP4: groups of 32 values. Each value is an e2m1 code (e2m1.cuh). Each group has a scale, a power of two in a UE8M0
// byte. 128 values are 64 bytes, and their four scales are a word.
//
// Tensor cores before sm_100 do not multiply e2m1. For them 128 values are widened to e5m2 under one factor, 2^-13 of
// the largest of their four scales. That is exact for groups whose scale is at least 2^-28 of the largest one. Values
// of smaller groups are truncated to multiples of 2^-29 of it. A factor below the least normal float32 counts as 0.
#pragma once
#include "rows/e2m1.cuh"

constexpr int MXFP4_GROUP = 32;
constexpr uint32_t UE8M0_NAN = 255;

// --- from bf16 ------------------------------------------------------------------------------------------------

// The scale of values whose largest magnitude is the bf16 `amax`: 2^ceil(log2(amax / 6)), as a byte that is at least
// `least` (1: 2^-126). Infinity gets 2^127.
__device__ __forceinline__ uint32_t mxfp4_scale(uint32_t amax, int least = 1) {
    const uint32_t exponent = amax >> 7, fraction = amax & 0x7f;
    if (exponent == 255) return fraction == 0 ? 254 : UE8M0_NAN;
    return max(int(exponent) - 2 + (fraction > 0x40), least);
}

// Two bf16 times `inverse`, at most 6 each, as codes in the lowest bits of two halves. Adding a power of two rounds a
// number to the unit in the last place of the sum, ties to even: here to multiples of 1/2, 1 or 2. That gives three
// candidate codes, one right up to 2, one up to 4, one up to 6. The least one is right.
__device__ __forceinline__ uint32_t e2m1x2(uint32_t x, uint32_t inverse) {
    const uint32_t magnitude = abs_bf16x2(x);
    const uint32_t halves = fma_bf16x2(magnitude, inverse, 0x42804280);             // 64, and the code
    const uint32_t ones = fma_bf16x2(magnitude, inverse, 0x43004300) - 0x007e007e;  // 128, and two less than the code
    const uint32_t twos = fma_bf16x2(magnitude, inverse, 0x43804380) - 0x00fc00fc;  // 256, and four less
    const uint32_t least = min_bf16x2(min_bf16x2(halves, ones), min_bf16x2(twos, 0x42874287));
    return (least & 0x00070007) | (x >> 12 & 0x00080008);
}

// Eight bf16 of a group as codes under the group's scale. If the scale is NaN, codes are 0.
__device__ __forceinline__ uint32_t quantize_e2m1_8(const Vec16& x, uint32_t scale) {
    const uint32_t inverse = (scale >= 254 ? 0x40u : (254 - scale) << 7) * 0x00010001;  // 2^-127 is subnormal
    const uint32_t two[4] = {e2m1x2(x.x, inverse), e2m1x2(x.y, inverse), e2m1x2(x.z, inverse), e2m1x2(x.w, inverse)};
    return scale == UE8M0_NAN ? 0 : join_codes(two);
}

// Joins the scales of four groups, held by 16 lanes, to a word that all 16 lanes get; each four lanes pass the scale
// of one group.
__device__ __forceinline__ uint32_t join_scales(uint32_t scale, int lane) {
    uint32_t scales = scale << lane / 4 * 8;
    scales |= __shfl_xor_sync(~0u, scales, 4);
    return scales | __shfl_xor_sync(~0u, scales, 8);
}

// --- to e5m2 --------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t largest_scale(uint32_t scales) {
    return max(max(scales & 255, scales >> 8 & 255), max(scales >> 16 & 255, scales >> 24));
}

// The factor of 128 values: 13 less in the exponent. NaN if a group's scale is NaN.
__device__ __forceinline__ float factor_of_scales(uint32_t largest) {
    const float factor = __uint_as_float(max(int(largest << 23) - (13 << 23), 0));
    return largest == UE8M0_NAN ? __uint_as_float(0x7fffffffu) : factor;
}

// The eight e2m1 magnitudes as bytes, in the order of their codes.
struct Magnitudes {
    uint32_t low, high;
};

// The magnitudes of a group whose scale is 2^-below of the largest one, if all are normal numbers: for 0 below, 0 and
// 2^12 to 1.5 * 2^15.
constexpr uint32_t MOST_BELOW_NORMAL = 26;
__device__ __forceinline__ Magnitudes normal_magnitudes_of(uint32_t below) {
    return {0x72706c00u - below * 0x04040400u, 0x7a787674u - below * 0x04040404u};
}

// The same for any group.
__device__ __forceinline__ Magnitudes magnitudes_of(uint32_t below) {
    if (__builtin_expect(below <= MOST_BELOW_NORMAL, true)) return normal_magnitudes_of(below);
    const float one = power_of_two(140 - int(min(below, 40u)));
    const auto upper_bytes = [](float a, float b, float c, float d) {  // of f16
        return __byte_perm(pack_f16x2(a, b), pack_f16x2(c, d), 0x7531);
    };
    return {upper_bytes(0.0f, 0.5f * one, one, 1.5f * one), upper_bytes(2 * one, 3 * one, 4 * one, 6 * one)};
}

// Eight codes as bytes, in their order.
__device__ __forceinline__ Vec8 widen_e2m1_8(uint32_t codes, const Magnitudes& of) {
    const uint32_t select = codes & 0x77777777, upper = codes << 4;  // signs of even codes in the bytes' highest bits
    const uint32_t low = __byte_perm(upper, codes, 0x5140), high = __byte_perm(upper, codes, 0x7362);
    return {select_bytes(of.low, of.high, select) | (low & 0x80808080u),
            select_bytes(of.low, of.high, select >> 16) | (high & 0x80808080u)};
}
