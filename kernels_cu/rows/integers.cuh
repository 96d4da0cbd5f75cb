// An array of a caller's integers, which may be int32 or int64.
#pragma once
#include "ptx/types.cuh"

struct Integers {
    const void* first;
    int32_t wide;  // the integers are int64
    int32_t unused;
};

__device__ __forceinline__ int64_t load_integer(const Integers& from, int64_t index) {
    if (from.wide) return static_cast<const int64_t*>(from.first)[index];
    return static_cast<const int32_t*>(from.first)[index];
}
