// Sums, maxima and exchanges among the lanes of a warp. Lane = 4 g + t, as in the accumulators of mma and wgmma.
#pragma once
#include "ptx/types.cuh"

// Returns a value that is the same in all lanes, such that the compiler knows it is.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Another lane's pointer.
template <typename T>
__device__ __forceinline__ T* shuffle_pointer(T* p, int lane) {
    return reinterpret_cast<T*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(p), lane));
}

// The lanes with `here` whose `number`, below COUNT, equals this lane's. (match.any compares one number after the
// other: to sort lists with it took 40 us more.)
template <int COUNT>
__device__ __forceinline__ uint32_t lanes_with_same(bool here, int number) {
    uint32_t lanes = __ballot_sync(~0u, here);
#pragma unroll
    for (int bit = 1; bit < COUNT; bit *= 2) {
        const uint32_t set = __ballot_sync(~0u, number & bit);
        lanes &= number & bit ? set : ~set;
    }
    return lanes;
}

// The sum over the lanes up to and including this one.
template <typename T>
__device__ __forceinline__ T inclusive_sum(T x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T other = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

// The sum of `x` over the CTA's threads before this one; `total` gets the sum over all. The CTA has COUNT warps;
// `warp_sums` is shared memory. All threads call.
template <typename T, int COUNT>
__device__ __forceinline__ T cta_sum_before(T x, T (&warp_sums)[COUNT], T& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const T sum = inclusive_sum(x, lane);
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    T before = 0;
    total = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (i < warp) before += warp_sums[i];
        total += warp_sums[i];
    }
    return before + sum - x;
}

// Reductions over a quad, the four lanes with the same g.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Four sums over a quad at once: lane t gets the sum of v[t]. The bits do not depend on which lane gets a sum.
__device__ __forceinline__ float quad_sum_of_mine(const float (&v)[4], int t) {
    const bool high = t >= 2, odd = t % 2 != 0;
    float first = high ? v[2] : v[0], second = high ? v[3] : v[1];  // of lanes t and t ^ 2
    first += __shfl_xor_sync(~0u, high ? v[0] : v[2], 2);
    second += __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
    return (odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, 1);
}

// Transposes 4 x 4 words of a quad: word k of lane t becomes word t of lane k.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], int t) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
        for (int low = 0; low < 4; ++low) {
            if (low & step) continue;
            const int high = low | step;
            const uint32_t sent = t & step ? v[low] : v[high];
            const uint32_t received = __shfl_xor_sync(~0u, sent, step);
            if (t & step) {
                v[low] = received;
            } else {
                v[high] = received;
            }
        }
    }
}

// Reductions over the eight lanes with the same t, that is, over the rows of an accumulator.
__device__ __forceinline__ float rows_max(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
__device__ __forceinline__ float rows_sum(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
