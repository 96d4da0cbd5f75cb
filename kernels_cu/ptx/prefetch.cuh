// PTX ISA: cp.async.bulk.prefetch.L2. sm_90.
#pragma once
#include "ptx/types.cuh"

// Start to bring `bytes` into L2. The address and the count are multiples of 16.
__device__ __forceinline__ void prefetch_in_bulk(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
