// Eight values of a quantized row: their codes in the cache, and their values under a scale. Constants of the layout:
// cupy_mla/layouts.py.
#pragma once
#include "rows/nvfp4.cuh"
#include "rows/quantize.cuh"

#if CODE_BITS == 4

using Codes = uint32_t;

// Loads the codes of values `value` .. + 7 of the row that begins at `data`; `value` is a multiple of eight.
__device__ __forceinline__ Codes load_codes(const uint8_t* data, int value) {
    return *reinterpret_cast<const Codes*>(data + value / 2);
}

// As bf16. Under a scale of 0 all values are 0, whatever their codes.
__device__ __forceinline__ Vec16 dequantize_codes(Codes codes, float scale) {
    return dequantize_nvfp4_8(codes, scale);
}

// Stores codes in the space of eight bf16, and reads them back.
__device__ __forceinline__ void keep_codes(Vec16& in, Codes codes) { in.x = codes; }
__device__ __forceinline__ Codes kept_codes(const Vec16& in) { return in.x; }

#else

using Codes = Vec8;

__device__ __forceinline__ Codes load_codes(const uint8_t* data, int value) {
    return *reinterpret_cast<const Codes*>(data + value);
}

__device__ __forceinline__ Vec16 dequantize_codes(const Codes& codes, float scale) {
    if constexpr (SCALE_E8M0) return dequantize_8(codes, scale);  // which is not 0
    return dequantize_8(codes_under(codes, scale), scale);
}

__device__ __forceinline__ void keep_codes(Vec16& in, const Codes& codes) { in.x = codes.x, in.y = codes.y; }
__device__ __forceinline__ Codes kept_codes(const Vec16& in) { return {in.x, in.y}; }

#endif
