// Online softmax in base 2. Accumulators and sums are relative to a reference, which rises with the logits.
#pragma once
#include "ptx/arithmetic.cuh"
#include "ptx/types.cuh"

// The reference or maximum that exponents subtract. It is 0 instead of -inf while there is no valid row, because -inf
// - -inf is NaN.
__device__ __forceinline__ float finite_reference(float ref) { return ref == -INF ? 0.0f : ref; }

// The factor 2^(from - to), which rescales a value from reference `from` to reference `to`. `from` is -inf while there
// is no reference.
__device__ __forceinline__ float rescale_factor(float from, float to) {
    return exp2_approx(from - finite_reference(to));
}

// log2 of a sum of exponentials; `sum` is relative to `ref`. -inf if there is no valid row.
__device__ __forceinline__ float log2_sum_exp(float ref, float sum) {
    return sum == 0.0f ? -INF : ref + log2_approx(sum);
}
