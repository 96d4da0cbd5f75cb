// Twin of kernels_cu/ptx/arithmetic.cuh. Approximations are the host's float32 functions. NaN results are PTX's
// canonical ones.
#pragma once
#include <algorithm>
#include <cmath>

#include "machine.h"
#include "ptx/types.cuh"

namespace emu {
// An operand or a result as an instruction has it: rounded here, so that no fma is made of a product and a sum.
inline float rounded(float x) {
    asm("" : "+x"(x));
    return x != x ? bits<float>(0x7fffffffu) : x;
}

// .ftz: a subnormal is a zero of its sign.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// Narrow numbers: a sign, EXPONENT and MANTISSA bits. LARGEST: what saturates, infinity where the format has one.
template <int EXPONENT, int MANTISSA, uint32_t LARGEST, uint32_t NAN_BITS>
struct Narrow {
    static constexpr int BIAS = (1 << (EXPONENT - 1)) - 1, SIGN = EXPONENT + MANTISSA;

    // Rounded to nearest, ties to even. The products are exact; adding 2^52 rounds.
    static uint32_t round(double x) {
        if (x != x) return NAN_BITS;
        const uint64_t wide = bits<uint64_t>(x), magnitude = wide & ~uint64_t(0) >> 1;
        const int exponent = std::max(int(magnitude >> 52) - 1023, 1 - BIAS);
        const double scale = bits<double>(uint64_t(1023 + MANTISSA - exponent) << 52);
        const uint32_t units = uint32_t(bits<uint64_t>(bits<double>(magnitude) * scale + 0x1p52));
        const uint32_t value = units + (uint32_t(exponent + BIAS - 1) << MANTISSA);  // a carry raises the exponent
        return uint32_t(wide >> 63) << SIGN | std::min(value, LARGEST);
    }

    // No table: statics of a kernel's library are shared memory.
    static float value(uint32_t item) {
        constexpr bool HAS_INFINITY = LARGEST == ((1u << EXPONENT) - 1) << MANTISSA;
        const uint32_t magnitude = item & ((1u << SIGN) - 1);
        uint32_t y = (magnitude << (23 - MANTISSA)) + (uint32_t(127 - BIAS) << 23);
        const float smallest = bits<float>(uint32_t(128 - BIAS) << 23);  // the smallest normal number
        const float subnormal = bits<float>(y + (1u << 23)) - smallest;
        y = magnitude >> MANTISSA == 0 ? bits<uint32_t>(subnormal) : y;
        y = HAS_INFINITY && magnitude == LARGEST ? 0x7f800000u : y;
        y = magnitude > LARGEST ? 0x7fffffffu : y | (item >> SIGN & 1) << 31;
        return bits<float>(y);
    }
};
using Bf16 = Narrow<8, 7, 0x7f80, 0x7fff>;
using F16 = Narrow<5, 10, 0x7c00, 0x7fff>;
using E4m3 = Narrow<4, 3, 0x7e, 0x7f>;

inline float bf16_value(uint32_t item) { return bits<float>(item << 16); }
inline float f16_value(uint32_t item) { return F16::value(item); }
inline float e4m3_value(uint32_t item) { return E4m3::value(item); }
inline float e5m2_value(uint32_t item) { return F16::value(item << 8 & 0xff00); }

// The same operation on both halves of a word.
template <typename Act>
inline uint32_t halves(uint32_t a, uint32_t b, Act act) {
    return act(a & 0xffff, b & 0xffff) | act(a >> 16, b >> 16) << 16;
}

// The maximum of two 16-bit numbers whose infinity is `inf`, NaN only of two NaNs. Ordered as integers, -0 below +0.
template <uint32_t INFINITE>
inline uint32_t max_of_halves(uint32_t a, uint32_t b) {
    const bool a_nan = (a & 0x7fff) > INFINITE, b_nan = (b & 0x7fff) > INFINITE;
    if (a_nan || b_nan) return a_nan ? b_nan ? 0x7fff : b : a;
    auto order = [](uint32_t x) { return x & 0x8000 ? -int(x & 0x7fff) - 1 : int(x); };
    return order(a) > order(b) ? a : b;
}
}  // namespace emu

// ex2.approx.ftz, lg2.approx.ftz, sqrt.approx.ftz, rcp.approx.ftz
inline float exp2_approx(float x) { return emu::rounded(emu::flushed(std::exp2(emu::flushed(x)))); }
inline float log2_approx(float x) { return emu::rounded(std::log2(emu::flushed(x))); }
inline float sqrt_approx(float x) { return emu::rounded(std::sqrt(emu::flushed(x))); }
inline float reciprocal_approx(float x) { return emu::rounded(emu::flushed(1.0f / emu::flushed(x))); }

// div.rn, mul.rn, add.rn, sub.rn, max.NaN and the product with a reciprocal: subnormals stay.
inline float divide_exactly(float a, float b) { return emu::rounded(a / b); }
inline float multiply_exactly(float a, float b) { return emu::rounded(a * b); }
inline float add_exactly(float a, float b) { return emu::rounded(emu::rounded(a) + emu::rounded(b)); }
inline float subtract_exactly(float a, float b) { return emu::rounded(emu::rounded(a) - emu::rounded(b)); }
inline float max_or_nan(float a, float b) {
    if (a != a || b != b) return emu::bits<float>(0x7fffffffu);
    return a > b || (a == b && std::signbit(b)) ? a : b;
}
inline float divide_by_constant(float a, float divisor) {
    const float reciprocal = emu::rounded(1.0f / divisor), quotient = emu::rounded(a * reciprocal);
    return emu::rounded(std::fma(emu::rounded(std::fma(quotient, -divisor, a)), reciprocal, quotient));
}

inline uint32_t min_in_32_bits(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t select) { return __byte_perm(a, b, select); }

// Two numbers in the halves of a word.
inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
    return emu::halves(a, b, [](uint32_t x, uint32_t y) { return std::max(x, y); });
}
inline uint32_t abs_bf16x2(uint32_t x) { return x & 0x7fff7fff; }
inline uint32_t max_bf16x2(uint32_t a, uint32_t b) { return emu::halves(a, b, emu::max_of_halves<0x7f80>); }
inline uint32_t min_bf16x2(uint32_t a, uint32_t b) {  // min(a, b) = -max(-a, -b); NaN only of two NaNs
    return emu::halves(a, b, [](uint32_t x, uint32_t y) {
        const uint32_t larger = emu::max_of_halves<0x7f80>(x ^ 0x8000, y ^ 0x8000);
        return (larger & 0x7fff) > 0x7f80 ? 0x7fffu : larger ^ 0x8000;
    });
}
inline uint32_t max_or_nan_bf16x2(uint32_t a, uint32_t b) {
    return emu::halves(a, b, [](uint32_t x, uint32_t y) {
        const bool nan = (x & 0x7fff) > 0x7f80 || (y & 0x7fff) > 0x7f80;
        return nan ? 0x7fffu : emu::max_of_halves<0x7f80>(x, y);
    });
}
inline uint32_t max_abs_bf16x2(uint32_t a, uint32_t b) {
    return emu::halves(a, b, [](uint32_t x, uint32_t y) {
        const uint32_t larger = emu::max_of_halves<0x7f80>(x & 0x7fff, y & 0x7fff);
        return larger > 0x7f80 ? larger : larger | ((x ^ y) & 0x8000);
    });
}
inline uint32_t min_abs_bf16x2(uint32_t a, uint32_t b) {
    return min_bf16x2(a & 0x7fff7fff, b & 0x7fff7fff) | ((a ^ b) & 0x80008000);
}
inline uint32_t max_f16x2(uint32_t a, uint32_t b) { return emu::halves(a, b, emu::max_of_halves<0x7c00>); }
inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    return emu::halves(a, b, [](uint32_t x, uint32_t y) {
        return emu::Bf16::round(double(emu::bf16_value(x)) * double(emu::bf16_value(y)));
    });
}
// Products of bf16 are exact in float64, and the sum with a third number of a like size is.
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    auto one = [&](int shift) {
        auto of = [&](uint32_t x) { return double(emu::bf16_value(x >> shift & 0xffff)); };
        return emu::Bf16::round(std::fma(of(a), of(b), of(c)));
    };
    return one(0) | one(16) << 16;
}
inline uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
    return emu::halves(a, b, [](uint32_t x, uint32_t y) {
        return emu::F16::round(double(emu::f16_value(x)) * double(emu::f16_value(y)));
    });
}

inline uint32_t larger_half(uint32_t two) { return std::max(two & 0xffff, two >> 16); }
