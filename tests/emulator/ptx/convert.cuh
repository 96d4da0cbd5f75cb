// Twin of kernels_cu/ptx/convert.cuh, with the integer variants for GPUs before sm_89.
#pragma once
#include "ptx/arithmetic.cuh"
#include "ptx/types.cuh"

// cvt.rn: `lo` in the low half, NaN becomes 0x7fff.
inline uint32_t pack_bf16x2(float lo, float hi) { return emu::Bf16::round(lo) | emu::Bf16::round(hi) << 16; }
inline uint32_t pack_f16x2(float lo, float hi) { return emu::F16::round(lo) | emu::F16::round(hi) << 16; }

inline float2 f16x2_to_float(uint32_t packed) {
    float2 v;
    v.x = emu::f16_value(packed), v.y = emu::f16_value(packed >> 16);
    return v;
}
inline float bf16_low(uint32_t packed) { return emu::bf16_value(packed); }
inline float bf16_high(uint32_t packed) { return emu::bf16_value(packed >> 16); }
inline float bf16_to_float(bf16 v) { return emu::bf16_value(v); }
inline uint32_t bf16x2_to_f16x2(uint32_t packed) { return pack_f16x2(bf16_low(packed), bf16_high(packed)); }

// Powers of two of biased exponents. UE8M0: 0 is 2^-127, 255 is NaN.
inline float power_of_two(int exponent) { return emu::bits<float>(uint32_t(exponent) << 23); }
inline float inverse_power_of_two(int exponent) { return power_of_two(254 - exponent); }
inline uint32_t power_of_two_bf16x2(int exponent) { return uint32_t(exponent) * 0x00800080; }
inline float ue8m0_to_float(uint32_t byte) {
    return emu::bits<float>(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fffffffu : byte << 23);
}

// Two of four e4m3 bytes in the upper bytes of two halves, in integers: the f16 bits s 0eeee mmm0... times 256.
inline uint32_t e4m3x2_to_f16x2(uint32_t bytes, uint32_t select) {
    const uint32_t upper = __byte_perm(bytes, 0, select);
    return emu::halves(upper, 0, [](uint32_t half, uint32_t) {
        const uint32_t magnitude = half & 0x7f00, small = (half & 0x8000) | magnitude >> 1;
        return multiply_f16x2(small, 0x5c00) | (magnitude == 0x7f00 ? 0x7e00u : 0);
    });
}

// Four e4m3 bytes, exact.
inline void e4m3x4_to_f16x2(uint32_t bytes, uint32_t& first, uint32_t& second) {
#if __CUDA_ARCH__ >= 890
    auto pair = [](uint32_t two) { return pack_f16x2(emu::e4m3_value(two), emu::e4m3_value(two >> 8)); };
    const uint32_t low = pair(bytes), high = pair(bytes >> 16);
    first = low, second = high;
#else
    const uint32_t low = e4m3x2_to_f16x2(bytes, 0x1404), high = e4m3x2_to_f16x2(bytes, 0x3424);
    first = low, second = high;
#endif
}
inline void e5m2x4_to_f16x2(uint32_t bytes, uint32_t& first, uint32_t& second) {
    const auto pair = [](uint32_t two) { return (two & 0xff) << 8 | (two & 0xff00) << 16; };
    const uint32_t low = pair(bytes), high = pair(bytes >> 16);
    first = low, second = high;
}
inline void e4m3x4_to_float(uint32_t bytes, float (&v)[4]) {
    for (int i = 0; i < 4; ++i) {
        const uint32_t b = bytes >> (8 * i) & 0xff;
#if __CUDA_ARCH__ >= 890
        v[i] = emu::e4m3_value(b);
#else
        const float small = emu::f16_value((b & 0x80) << 8 | (b & 0x7f) << 7);
        v[i] = (b & 0x7f) == 0x7f ? emu::bits<float>(0x7fffffffu) : small * 256.0f;
#endif
    }
}

// Float32 to e4m3 in integers, to nearest even, saturating at 448; NaN becomes 0x7f.
inline uint32_t float_to_e4m3(float x) {
    const uint32_t word = emu::bits<uint32_t>(x), sign = word >> 24 & 0x80, magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7f;
    if (magnitude >= 0x43e00000) return sign | 0x7e;  // 448
    if (magnitude < 0x3c800000)                       // 2^-6: multiples of 2^-9
        return sign | (emu::bits<uint32_t>(emu::bits<float>(magnitude) + 16384.0f) & 0xf);
    return sign | (((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3));
}

// cvt.rn.satfinite.e4m3x2: NaN becomes 0x7f.
inline uint32_t float_to_e4m3x4(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
    auto byte = [](float x) { return emu::E4m3::round(x); };
#else
    auto byte = [](float x) { return float_to_e4m3(x); };
#endif
    return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}
