// Twin of kernels_cu/ptx/wgmma.cuh. A product is queued and done later, by each thread for its own accumulators
// (wgmma_queue.h); until then accumulators to be set are NaN. A in registers is read when the product is issued,
// operands in shared memory when it is done.
#pragma once
#include <type_traits>

#include "machine.h"
#include "ptx/arithmetic.cuh"
#include "ptx/registers.cuh"
#include "ptx/types.cuh"
#include "wgmma_queue.h"

enum class Values { BF16, F16 };
enum class Sum { SET, ADD };
enum class Major { K, MN };

// Descriptions: bits 0 start address, 16 columns, 32 line groups, all in units of 16 bytes; 62: 1, the swizzle of 128
// bytes, or 0, none.
inline uint64_t wgmma_plain_operand(uint32_t address, uint32_t line_groups, uint32_t columns) {
    return uint64_t(line_groups / 16) << 32 | uint64_t(columns / 16) << 16 | (address & 0x3ffff) / 16;
}
inline uint64_t wgmma_operand(uint32_t address, uint32_t line_groups, uint32_t columns) {
    return wgmma_plain_operand(address, line_groups, columns) | uint64_t(1) << 62;
}
inline uint64_t wgmma_further(uint64_t operand, uint32_t bytes) {
    return operand >> 32 << 32 | (uint32_t(operand) + bytes / 16);
}
inline uint64_t wgmma_operand_number(uint64_t first, int i, int bytes) {
    return first >> 32 << 32 | (uint32_t(first) + uint32_t(i * (bytes / 16)));
}

namespace emu {
// An operand in shared memory: where the 16 bytes stand that a place of the matrix is in. A line is a row of A or a
// column of B (K-major), or a step of k (MN-major).
struct WgmmaOperand {
    uint32_t start, columns, line_groups;
    bool swizzled;

    explicit WgmmaOperand(uint64_t bits)
        : start((bits & 0x3fff) * 16),
          columns((bits >> 16 & 0x3fff) * 16),
          line_groups((bits >> 32 & 0x3fff) * 16),
          swizzled(bits >> 62 == 1) {
        if (bits >> 62 > 1 || (bits >> 49 & 7) != 0) fail("wgmma: an operand under another swizzle");
    }

    // The swizzle is one of absolute addresses: bits 4-6 xor bits 7-9.
    const char* at(uint32_t address) const {
        return loaded_by_wgmma(swizzled ? address ^ (address >> 3 & 0x70) : address);
    }
    const char* k_major(int line, int chunk) const {
        const uint32_t group = start + line / 8 * line_groups;
        return at(swizzled ? group + line % 8 * 128 + chunk * 16 : group + line % 8 * 16 + chunk * columns);
    }
    const char* mn_major(int k, int chunk) const {
        if (!swizzled) fail("wgmma: an MN-major operand without swizzle");
        return at(start + k / 8 * line_groups + k % 8 * 128 + chunk / 8 * columns + chunk % 8 * 16);
    }
};

// Item types.
struct Bf16Item {
    using Bits = uint16_t;
    static float value(Bits bits) { return bf16_value(bits); }
};
struct F16Item {
    using Bits = uint16_t;
    static float value(Bits bits) { return f16_value(bits); }
};
struct E4m3Item {
    using Bits = uint8_t;
    static float value(Bits bits) { return e4m3_value(bits); }
};
struct E5m2Item {
    using Bits = uint8_t;
    static float value(Bits bits) { return e5m2_value(bits); }
};
template <Values VALUES>
using ItemOf = std::conditional_t<VALUES == Values::BF16, Bf16Item, F16Item>;
template <typename Item>
constexpr int STEPS = 32 / sizeof(typename Item::Bits);  // of k in an instruction

template <typename Item>
inline float item(const char* chunk, int i) {
    typename Item::Bits bits;
    std::memcpy(&bits, chunk + i * sizeof(bits), sizeof(bits));
    return Item::value(bits);
}

// The values of a line of a K-major operand, `apart` from one to the next.
template <typename Item>
inline void expand_line(const WgmmaOperand& operand, int line, float* values, int apart) {
    constexpr int OF_CHUNK = STEPS<Item> / 2;
    for (int chunk = 0; chunk < 2; ++chunk) {
        const char* items = operand.k_major(line, chunk);
        float side_by_side[OF_CHUNK];  // g++ makes vectors of this
        for (int i = 0; i < OF_CHUNK; ++i) side_by_side[i] = item<Item>(items, i);
        for (int i = 0; i < OF_CHUNK; ++i) values[(chunk * OF_CHUNK + i) * apart] = side_by_side[i];
    }
}

// Warp w, lane 4 g + t: rows 16 w + g and 8 further of A.
template <typename Item, Major MAJOR>
inline void expand_a(uint64_t bits, float (&rows)[2][STEPS<Item>]) {
    const WgmmaOperand operand(bits);
    for (int i = 0; i < 2; ++i) {
        const int row = thread() / 32 % 4 * 16 + lane() / 4 + 8 * i;
        if constexpr (MAJOR == Major::K)
            expand_line<Item>(operand, row, rows[i], 1);
        else
            for (int k = 0; k < STEPS<Item>; ++k) rows[i][k] = item<Item>(operand.mn_major(k, row / 8), row % 8);
    }
}

// Columns 8 j + 2 t and 1 further of B, side by side.
template <typename Item, Major MAJOR, int COLUMNS>
inline void expand_b(uint64_t bits, float (&steps)[STEPS<Item>][COLUMNS]) {
    const WgmmaOperand operand(bits);
    const int t = lane() % 4;
    for (int j = 0; j < COLUMNS / 2; ++j) {
        if constexpr (MAJOR == Major::K) {
            for (int k = 0; k < 2; ++k) expand_line<Item>(operand, 8 * j + 2 * t + k, &steps[0][2 * j + k], COLUMNS);
        } else {
            for (int k = 0; k < STEPS<Item>; ++k) {
                const char* items = operand.mn_major(k, j);
                for (int i = 0; i < 2; ++i) steps[k][2 * j + i] = item<Item>(items, 2 * t + i);
            }
        }
    }
}

// c (+)= rows x steps.
template <Sum SUM, int K, int COLUMNS>
inline void multiply_add(float* c, const float (&rows)[2][K], const float (&steps)[K][COLUMNS]) {
    float sums[2][COLUMNS] = {};
    for (int k = 0; k < K; ++k)
        for (int i = 0; i < 2; ++i)
            for (int n = 0; n < COLUMNS; ++n) sums[i][n] += rows[i][k] * steps[k][n];
    for (int i = 0; i < 2; ++i) {
        for (int n = 0; n < COLUMNS; ++n) {
            float& of = c[n / 2 * 4 + 2 * i + n % 2];
            of = SUM == Sum::SET ? sums[i][n] : of + sums[i][n];
        }
    }
}

template <typename Item, Sum SUM, bool REGISTERS, Major A, Major B, int N>
void run_wgmma(const Wgmma& product) {
    float rows[2][STEPS<Item>], steps[STEPS<Item>][N / 2];
    if constexpr (REGISTERS)
        std::memcpy(rows, product.a_registers, sizeof(rows));
    else
        expand_a<Item, A>(product.a, rows);
    expand_b<Item, B>(product.b, steps);
    multiply_add<SUM>(product.c, rows, steps);
}

template <typename Item, Sum SUM, bool REGISTERS, Major A, Major B, int N>
inline Wgmma& issue(float (&c)[N], uint64_t a, uint64_t b) {
    count_product();
    if (SUM == Sum::SET)
        for (float& of : c) of = bits<float>(0x7fffffffu);
    auto& open = wgmma_queue().open;
    open.push_back({run_wgmma<Item, SUM, REGISTERS, A, B, N>, c, a, b, {}});
    return open.back();
}
}  // namespace emu

inline void wgmma_fence() {}
inline void wgmma_commit() { emu::commit_wgmmas(); }

template <int N>
inline void wgmma_wait() {
    emu::wait_for_wgmmas(N);
}

// 64 x N, N = 2 * (accumulators of a thread). A in shared memory, ...
template <Values VALUES, Sum SUM, Major A, Major B, int N>
inline void wgmma(float (&c)[N], uint64_t a, uint64_t b) {
    static_assert(N == 4 || N == 8 || N == 16 || N == 32 || N == 128, "");
    emu::issue<emu::ItemOf<VALUES>, SUM, false, A, B>(c, a, b);
}

// ... or in registers.
template <Values VALUES, Sum SUM, Major B, int N>
inline void wgmma(float (&c)[N], const uint32_t (&a)[4], uint64_t b) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 128, "");
    using Item = emu::ItemOf<VALUES>;
    emu::Wgmma& product = emu::issue<Item, SUM, true, Major::K, B>(c, 0, b);
    for (int half = 0; half < 2; ++half) {
        const uint64_t* all = emu::exchange(a[2 * half] | uint64_t(a[2 * half + 1]) << 32) + emu::lane() / 4 * 4;
        for (int i = 0; i < 2; ++i)
            for (int k = 0; k < 8; ++k)
                product.a_registers[16 * i + 8 * half + k] =
                    Item::value(uint16_t(all[k / 2] >> (32 * i + 16 * (k % 2))));
    }
}

// On bytes of one type, K-major. A in shared memory, e4m3 or e5m2, ...
template <bool E5M2, Sum SUM, int N>
inline void wgmma_bytes(float (&c)[N], uint64_t a, uint64_t b) {
    static_assert(N == 16 || N == 32 || N == 64 || N == 96 || N == 128, "");
    emu::issue<std::conditional_t<E5M2, emu::E5m2Item, emu::E4m3Item>, SUM, false, Major::K, Major::K>(c, a, b);
}

// ... or in registers, e5m2.
template <Sum SUM, int N>
inline void wgmma_e5m2(float (&c)[N], const uint32_t (&a)[4], uint64_t b) {
    static_assert(N == 16 || N == 32 || N == 64 || N == 96 || N == 128, "");
    emu::Wgmma& product = emu::issue<emu::E5m2Item, SUM, true, Major::K, Major::K>(c, 0, b);
    for (int half = 0; half < 2; ++half) {
        const uint64_t* all = emu::exchange(a[2 * half] | uint64_t(a[2 * half + 1]) << 32) + emu::lane() / 4 * 4;
        for (int i = 0; i < 2; ++i)
            for (int k = 0; k < 16; ++k)
                product.a_registers[32 * i + 16 * half + k] =
                    emu::E5m2Item::value(uint8_t(all[k / 4] >> (32 * i + 8 * (k % 4))));
    }
}
