// A scale that is an argument of the call: of all rows of layout PLAIN_FP8, or of an e4m3 q.
#pragma once
#include "ptx/types.cuh"

// cupy_mla/cuda/structs.py declares the same fields.
struct CallScale {
    const float* on_device;  // null: the value is `known`
    float known;
    int32_t unused;  // keeps the size a multiple of 8
};

__device__ __forceinline__ float load_call_scale(const CallScale& scale) {
    return scale.on_device == nullptr ? scale.known : *scale.on_device;
}
