// Twin of kernels_cu/ptx/mma_sync.cuh. A lane gets the rows of A of its four lanes, and its two columns of B.
#pragma once
#include "machine.h"
#include "ptx/arithmetic.cuh"
#include "ptx/types.cuh"

namespace emu {
// VALUES: of a register. The value of index k: register k / 8 (16-bit values) of the lane that holds k % 8.
template <int VALUES, typename ValueA, typename ValueB>
inline void multiply_fragments(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, ValueA value_a,
                               ValueB value_b) {
    count_product();
    constexpr int BITS = 32 / VALUES, K = 8 * VALUES;
    const int g = lane() / 4, t = lane() % 4;
    float rows[2][K], columns[2][K];
    // The words of lanes 4 `line` .. + 3: half `at` of the line's K values.
    auto expand = [&](float* line_values, const uint64_t* all, int line, int shift, int at, auto value) {
        for (int i = 0; i < 4 * VALUES; ++i) {
            const uint32_t word = uint32_t(all[4 * line + i / VALUES] >> shift);
            line_values[at * K / 2 + i] = value(word >> (BITS * (i % VALUES)));
        }
    };
    for (int at = 0; at < 2; ++at) {
        const uint64_t* all = exchange(a[2 * at] | uint64_t(a[2 * at + 1]) << 32);
        for (int i = 0; i < 2; ++i) expand(rows[i], all, g, 32 * i, at, value_a);
    }
    const uint64_t* all = exchange(b0 | uint64_t(b1) << 32);
    for (int k = 0; k < 2; ++k)
        for (int at = 0; at < 2; ++at) expand(columns[k], all, 2 * t + k, 32 * at, at, value_b);
    for (int i = 0; i < 4; ++i) {
        float sum = 0;
        for (int k = 0; k < K; ++k) sum += rows[i / 2][k] * columns[i % 2][k];
        c[i] += sum;
    }
}
template <int VALUES, typename Value>
inline void multiply_fragments(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Value value) {
    multiply_fragments<VALUES>(c, a, b0, b1, value, value);
}
}  // namespace emu

inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emu::multiply_fragments<2>(c, a, b0, b1, [](uint32_t bits) { return emu::bf16_value(bits); });
}
inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emu::multiply_fragments<2>(c, a, b0, b1, [](uint32_t bits) { return emu::f16_value(bits); });
}

enum class Fp8 { E4M3, E5M2 };

template <Fp8 A, Fp8 B>
inline void mma_m16n8k32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emu::multiply_fragments<4>(
        c, a, b0, b1, [](uint32_t bits) { return A == Fp8::E4M3 ? emu::e4m3_value(bits) : emu::e5m2_value(bits); },
        [](uint32_t bits) { return B == Fp8::E4M3 ? emu::e4m3_value(bits) : emu::e5m2_value(bits); });
}
