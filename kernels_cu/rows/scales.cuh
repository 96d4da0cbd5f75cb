// The scales of a quantized row: their values, and how they are stored. Constants of the layout (cupy_mla/layouts.py)
// say of which kind they are:
//   SCALE_OF_CALL   a row has none: one scale for all rows is an argument of the call
//   SCALE_E8M0      powers of two, a byte each, with padding behind them
//   SCALE_E4M3      e4m3 (NVFP4), a byte each, with padding behind them
//   else            float32
#pragma once
#include "ptx/convert.cuh"
#include "rows/call_scale.cuh"
#include "rows/nvfp4.cuh"
#include "rows/quantize.cuh"

constexpr float FLOAT_MIN = 1.17549435e-38f;  // the least normal float32

// The scale of values whose largest magnitude is `amax`. `power_of_two`: float32 scales are rounded up to powers of
// two. `least`: the least UE8M0 scale, a power of two; or the least float32 scale that is not rounded up, one or 0.
// Float32 scales that are not normal count as 0.
__device__ __forceinline__ float scale_of_values(float amax, bool power_of_two, float least) {
    if (SCALE_E8M0) return power_of_two_from(fmaxf(scale_from_amax(amax), least));
    const float ratio = scale_from_amax(amax);
    if (power_of_two) return power_of_two_from(fmaxf(ratio, AMAX_FLOOR));
    return fmaxf(ratio < FLOAT_MIN ? 0.0f : ratio, least);
}

// Writes scale number `tile` of the row whose scales begin at `scales`. Numbers beyond the last scale write padding.
__device__ __forceinline__ void store_scale(uint8_t* scales, int tile, float scale) {
    if (SCALE_E8M0) {
        scales[tile] = tile < NUM_SCALES ? uint8_t(__float_as_uint(scale) >> 23) : 0;
    } else {
        reinterpret_cast<float*>(scales)[tile] = scale;
    }
}

// The place of scale number `tile` among a row's scales, if these are bytes.
__device__ __forceinline__ int place_of_scale(int tile) {
    return SCALES_IN_FOURS ? tile % 4 * (NUM_SCALES / 4) + tile / 4 : tile;
}

// The same for an e4m3 scale.
__device__ __forceinline__ void store_e4m3_scale(uint8_t* scales, int tile, uint32_t scale) {
    scales[place_of_scale(tile)] = tile < NUM_SCALES ? scale : 0;
}

__device__ __forceinline__ float load_scale(const uint8_t* scales, int tile) {
    if constexpr (SCALE_E4M3) return e4m3_to_float(scales[place_of_scale(tile)]);
    return SCALE_E8M0 ? ue8m0_to_float(scales[tile]) : *reinterpret_cast<const float*>(scales + 4 * tile);
}

// The scale of value number `value` of the row whose scales begin at `scales`.
__device__ __forceinline__ float scale_of_value(const CallScale& of_call, const uint8_t* scales, int value) {
    if constexpr (SCALE_OF_CALL) return load_call_scale(of_call);
    return load_scale(scales, value / max(SCALE_TILE, 1));
}
