// PTX ISA: bar.sync on a named barrier.
#pragma once
#include "ptx/types.cuh"

// Wait until `threads` threads have come to barrier `id` (1 to 15; 0 is __syncthreads).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
