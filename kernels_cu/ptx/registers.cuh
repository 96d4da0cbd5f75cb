// PTX ISA: mov from special registers (%tid, %nctaid); and an empty asm statement that hides a value from the
// compiler.
#pragma once
#include "ptx/types.cuh"

// Returns x. The compiler does not know that, so it cannot hoist out of a loop what is derived from the result. There
// it would occupy registers.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The same, but the compiler may move it or drop it.
__device__ __forceinline__ uint32_t opaque_value(uint32_t x) {
    asm("" : "+r"(x));
    return x;
}

// threadIdx.x, read anew at each call, so that nothing derived from it stays in registers.
__device__ __forceinline__ int read_thread_index() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// gridDim.x, read anew at each call.
__device__ __forceinline__ int read_num_ctas() {
    int ctas;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
    return ctas;
}
