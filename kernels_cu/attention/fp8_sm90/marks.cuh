// Of fp8_sm90: what the consumers are told of a stage.
#pragma once
#include "attention/fp8_sm90/plan.cuh"

// The marks of a stage: a bit a row, if it is valid, and what follows its tile. With several copiers a byte for each.
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

// What follows a tile in its split: anything, one tile at most, none; or this is none, but the end of the split.
enum Follows : uint32_t { ANYTHING = 0, ONE_AT_MOST = 1 << WARP_ROWS, NONE = 2 << WARP_ROWS, ENDED = 3 << WARP_ROWS };
constexpr uint32_t FOLLOWS = 3 << WARP_ROWS;
constexpr uint32_t OF_EXTRA = 8 << WARP_ROWS;  // FP4_EXTRA: a mark: rows of the tile are the extra cache's
