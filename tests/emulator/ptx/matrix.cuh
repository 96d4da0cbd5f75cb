// Twin of kernels_cu/ptx/matrix.cuh. Every lane reads or writes the line that it gives the address of; the lanes
// exchange lines (ldmatrix) or fragments (stmatrix). All lines have been read when ldmatrix returns to the first lane.
#pragma once
#include "machine.h"
#include "ptx/types.cuh"

namespace emu {
// A line, eight 16-bit items.
struct MatrixLine {
    uint16_t items[8];
};
inline void check_line(uint32_t address) {
    if (address % 16) fail("ldmatrix or stmatrix of a line that is not aligned to 16 bytes");
}

template <bool TRANS>
inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
    uint64_t mine[2];
    check_line(address);
    std::memcpy(mine, loaded(address, 16), 16);
    MatrixLine lines[32];
    for (int half = 0; half < 2; ++half) {
        const uint64_t* all = exchange(mine[half]);
        for (int i = 0; i < 32; ++i) std::memcpy(&lines[i].items[4 * half], &all[i], 8);
    }
    const int g = lane() / 4, t = lane() % 4;
    for (int i = 0; i < 4; ++i) {
        const MatrixLine* line = lines + 8 * i;
        r[i] = TRANS ? line[2 * t].items[g] | uint32_t(line[2 * t + 1].items[g]) << 16
                     : line[g].items[2 * t] | uint32_t(line[g].items[2 * t + 1]) << 16;
    }
}

template <bool TRANS, int N>
inline void store_matrices(uint32_t address, const uint32_t (&r)[N]) {
    const int matrix = lane() / 8, j = lane() % 8;
    MatrixLine line{};
    for (int pair = 0; pair < N / 2; ++pair) {
        const uint64_t* all = exchange(r[2 * pair] | uint64_t(r[2 * pair + 1]) << 32);
        if (matrix / 2 != pair) continue;
        for (int i = 0; i < 8; ++i) {
            const int row = TRANS ? i : j, column = TRANS ? j : i;
            line.items[i] = uint16_t(all[4 * row + column / 2] >> (32 * (matrix % 2) + 16 * (column % 2)));
        }
    }
    if (matrix >= N) return;
    check_line(address);
    std::memcpy(stored(address, 16), &line, 16);
}
}  // namespace emu

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { emu::load_matrices<false>(r, address); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { emu::load_matrices<true>(r, address); }
inline void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    emu::store_matrices<false, 4>(address, {a, b, c, d});
}
inline void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    emu::store_matrices<true, 4>(address, {a, b, c, d});
}
inline void stmatrix_x2_trans(uint32_t address, uint32_t a, uint32_t b) {
    emu::store_matrices<true, 2>(address, {a, b});
}
