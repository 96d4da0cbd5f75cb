// PTX ISA: bar.sync, bar.arrive and bar.red.or on a named barrier. Barriers are 1 to 15; 0 is __syncthreads.
#pragma once
#include "ptx/types.cuh"

// bar.sync: waits until `threads` threads have arrived at barrier `id`, this one included.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive: arrives, and does not wait.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.red.or: waits as named_barrier_sync does. Returns true if any of the threads passed true.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool mine) {
    uint32_t any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 p, %3, 0;\n"
        "bar.red.or.pred q, %1, %2, p;\n"
        "selp.u32 %0, 1, 0, q;\n"
        "}\n"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(uint32_t(mine))
        : "memory");
    return any != 0;
}
