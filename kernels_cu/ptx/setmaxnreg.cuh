// PTX ISA: setmaxnreg: the registers that each thread of this warpgroup may use from here on. sm_90a.
#pragma once
#include "ptx/types.cuh"

// A warpgroup gives registers back, ...
template <int N>
__device__ __forceinline__ void decrease_registers_to() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ... another one waits until it gets them.
template <int N>
__device__ __forceinline__ void increase_registers_to() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
