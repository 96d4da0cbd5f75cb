// Part of fp8_sm90: the marks with which producer warps tell the consumers about a stage.
#pragma once
#include "attention/fp8_sm90/plan.cuh"

// The marks of a stage: a bit for each valid row, and what follows its tile. With several COPIERS each writes a byte
// of its own.
constexpr uint32_t ALL_VALID = COPIERS == 1 ? 0xffff : 0x0f0f0f0f;
__device__ __forceinline__ int valid_bit(int row) { return row / WARP_ROWS * 8 + row % WARP_ROWS; }
__device__ __forceinline__ void store_marks(int place, int copier, uint32_t marks) {
    uint32_t& word = small().marks[place];
    if (COPIERS == 1) {
        word = marks;
    } else {
        reinterpret_cast<uint8_t*>(&word)[copier] = uint8_t(marks);
    }
}

// What the split still has after a tile: ANYTHING is possible, ONE_AT_MOST more tile, or NONE. ENDED: this is no tile,
// it only says that the split has ended.
enum Follows : uint32_t { ANYTHING = 0, ONE_AT_MOST = 1 << WARP_ROWS, NONE = 2 << WARP_ROWS, ENDED = 3 << WARP_ROWS };
constexpr uint32_t FOLLOWS = 3 << WARP_ROWS;
constexpr uint32_t EXTRA_TILE = 8 << WARP_ROWS;  // FP4_EXTRA: the tile has rows of the extra cache
