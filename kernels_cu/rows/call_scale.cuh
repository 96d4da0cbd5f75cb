// A scale that a call brings: of all rows of layout PLAIN_FP8, or of a query in e4m3.
#pragma once
#include "ptx/types.cuh"

// cupy_mla/cuda/structs.py declares the same fields.
struct CallScale {
    const float* on_device;  // or null: the host knows it
    float known;
    int32_t unused;  // keeps the size a multiple of 8
};

__device__ __forceinline__ float load_call_scale(const CallScale& scale) {
    return scale.on_device == nullptr ? scale.known : *scale.on_device;
}
