// The items of q, of rows that are not quantized, and of the output: bfloat16, or float16 (HALF_ITEMS, by the layout).
#pragma once
#include "ptx/convert.cuh"

// Two float32 to items, round to nearest even; `lo` in the low half.
__device__ __forceinline__ uint32_t pack_items(float lo, float hi) {
    return HALF_ITEMS ? pack_f16x2(lo, hi) : pack_bf16x2(lo, hi);
}
