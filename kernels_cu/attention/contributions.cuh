// What queries contribute to the gradients of rows, between the backward's kernels, and how gradients are stored.
#pragma once
#include "ptx/convert.cuh"

constexpr int CONTRIBUTING_WARPS = 8;
constexpr int V_COLUMNS = D_V / CONTRIBUTING_WARPS;  // of a warp, among the first D_V
constexpr int ROPE_COLUMNS = (D_QK - D_V) / CONTRIBUTING_WARPS;
static_assert(V_COLUMNS == 64 && (ROPE_COLUMNS == 8 || ROPE_COLUMNS == 0), "");

// The column of a value of a contribution. A lane of an accumulator, t of its quad, has columns 8 j + 2 t and the next of
// 64; the 16 values that it has stand side by side.
__device__ __forceinline__ int contributed_column(int at) {
    return at / 64 * 64 + at % 16 / 2 * 8 + at % 64 / 16 * 2 + at % 2;
}

// Two neighbouring values of a gradient; `aligned`: in one store.
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
