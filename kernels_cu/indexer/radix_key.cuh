// Logits as unsigned integers that sort as the logits do, for selection by radix.
#pragma once
#include "ptx/arithmetic.cuh"

// Larger for larger logits. Both zeros have one key. NaN has key 1, below -inf. No logit has key 0.
__device__ __forceinline__ uint32_t radix_key_of(float logit) {
    const uint32_t bits = __float_as_uint(add_exactly(logit, 0.0f));  // -0 becomes +0; every NaN 0x7fffffff
    return (bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u)) + 2;
}
