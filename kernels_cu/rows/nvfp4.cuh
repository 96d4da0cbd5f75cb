// NVFP4: e2m1 under an e4m3 scale each 16 values, to the bit as the formats' writers compute them. Constants of the layout:
// cupy_mla/layouts.py.
#pragma once
#include "rows/e2m1.cuh"
#include "rows/quantize.cuh"

constexpr uint32_t E4M3_NAN = 0x7f, E4M3_LARGEST = 0x7e;

__device__ __forceinline__ float e4m3_to_float(uint32_t byte) {
    float v[4];
    e4m3x4_to_float(byte & 0xff, v);
    return v[0];
}

// The scale of values of which the largest magnitude is the bf16 `amax`: amax / 6 as e4m3, the nearest one, or `up` the
// next that is not below. NaN of NaN and infinity.
__device__ __forceinline__ uint32_t nvfp4_scale(uint32_t amax, bool up) {
    if (amax >= 0x7f80) return E4M3_NAN;
    const float sixth = divide_by_constant(bf16_low(amax), 6.0f),
                ratio = SCALES_FLOORED ? fmaxf(sixth, 0x1p-9f) : sixth;
    const uint32_t scale = float_to_e4m3x4(ratio, 0.0f, 0.0f, 0.0f) & 0xff;
    return scale + (up && scale < E4M3_LARGEST && e4m3_to_float(scale) < ratio);
}

// Eight bf16 of a tile as codes under the tile's scale; zeros under NaN.
__device__ __forceinline__ uint32_t quantize_nvfp4_8(const Vec16& x, uint32_t scale) {
    const float inverse = scale == 0 ? 0.0f : divide_exactly(1.0f, e4m3_to_float(scale));
    float v[CHUNK];
    widen_8(x, v);
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) codes |= float_to_e2m1(v[i] * inverse) << 4 * i;
    return scale == E4M3_NAN ? 0 : codes;
}
