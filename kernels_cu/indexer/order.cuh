// Logits as integers of the same order.
#pragma once
#include "ptx/arithmetic.cuh"

// Larger for larger logits, equal for both zeros; 1 for NaN, and never 0, which stands for no logit.
__device__ __forceinline__ uint32_t order_of(float logit) {
    const uint32_t bits = __float_as_uint(add_exactly(logit, 0.0f));  // -0 becomes +0; every NaN 0x7fffffff
    return (bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u)) + 2;
}
