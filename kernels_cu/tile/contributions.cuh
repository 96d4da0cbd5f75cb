// Contributions of queries to the gradients of rows: their layout in memory between the kernels of training, and how
// gradients are stored.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/global.cuh"

constexpr int OF_ITEM_BEFORE = -1;  // the count of a query whose list is part of the union of an earlier query's group

// The index, in 64 columns of a contribution, of columns 8 j + 2 t and 8 j + 2 t + 1, which lane t of an accumulator's
// quad holds. A lane's values of four j are neighbours, and a quad's are 64 bytes, so that a store writes whole
// sectors.
__device__ __forceinline__ constexpr int place_of_pair(int j, int t) { return j / 4 * 32 + 8 * t + j % 4 * 2; }

// The column of value number `at` of a contribution.
__device__ __forceinline__ int contributed_column(int at) {
    return at / 64 * 64 + (at % 64 / 32 * 4 + at % 8 / 2) * 8 + at % 32 / 8 * 2 + at % 2;
}

// Stores a thread's part of 64 columns of a contribution: pairs[j] holds columns 8 j + 2 t and + 1. `to`: where these
// 64 columns begin.
__device__ __forceinline__ void store_contribution(bf16* to, int t, const uint32_t (&pairs)[8]) {
    store_16(to + place_of_pair(0, t), {pairs[0], pairs[1], pairs[2], pairs[3]});
    store_16(to + place_of_pair(4, t), {pairs[4], pairs[5], pairs[6], pairs[7]});
}

// Stores two neighbouring values of a gradient; if `aligned`, in one store.
__device__ __forceinline__ void store_pair(float* to, float x, float y, bool aligned) {
    if (aligned) {
        *reinterpret_cast<float2*>(to) = make_float2(x, y);
    } else {
        to[0] = x, to[1] = y;
    }
}
__device__ __forceinline__ void store_pair(bf16* to, float x, float y, bool aligned) {
    const uint32_t packed = pack_bf16x2(x, y);
    if (aligned) {
        *reinterpret_cast<uint32_t*>(to) = packed;
    } else {
        to[0] = bf16(packed), to[1] = bf16(packed >> 16);
    }
}
