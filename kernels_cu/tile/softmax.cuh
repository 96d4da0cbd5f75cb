// Online softmax in base 2: accumulators and sums are relative to a reference, which rises with the logits.
#pragma once
#include "ptx/arithmetic.cuh"
#include "ptx/types.cuh"

// What the exponent subtracts for a reference or a maximum. It is 0 while there is no valid row, since -inf - -inf is NaN.
__device__ __forceinline__ float finite_reference(float ref) { return ref == -INF ? 0.0f : ref; }

// The factor 2^(from - to), which makes a value relative to `to` of one relative to `from`. -inf: no reference yet.
__device__ __forceinline__ float rescale_factor(float from, float to) {
    return exp2_approx(from - finite_reference(to));
}

// log2 of the sum of exponentials: `sum` is relative to `ref`. No valid row: -inf.
__device__ __forceinline__ float log2_sum_exp(float ref, float sum) {
    return sum == 0.0f ? -INF : ref + log2_approx(sum);
}
