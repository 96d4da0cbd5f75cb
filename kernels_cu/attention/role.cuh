// The role of a thread in a consumer warpgroup.
#pragma once
#include "tile/warp.cuh"

constexpr int WARPGROUP = 128;  // threads

// Warpgroup, warp in it, and lane 4 g + t. The lane holds rows g and g + 8 of its warp's 16, and columns 2 t and 2 t +
// 1 of each eight.
struct Role {
    int warpgroup, warp, lane, g, t;

    // Unsigned numbers take fewer instructions.
    static __device__ __forceinline__ Role of_lane(uint32_t lane, int warpgroup, int warp) {
        return {warpgroup, warp, int(lane), int(lane / 4), int(lane % 4)};
    }
    static __device__ __forceinline__ Role of(uint32_t thread, int warpgroup, int warp) {
        return of_lane(thread % 32, warpgroup, warp);
    }
    // Row i of this thread's two, in a tile of 64.
    __device__ __forceinline__ int row(int i) const { return 16 * warp + g + 8 * i; }
    // The c-th head of this thread, where heads are columns (tile/heads.cuh).
    __device__ __forceinline__ int head(int c) const { return c / 2 * 8 + 2 * t + c % 2; }
};
