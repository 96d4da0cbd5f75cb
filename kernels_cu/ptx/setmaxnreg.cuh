// PTX ISA: setmaxnreg: sets how many registers each thread of this warpgroup may use from here on. sm_90a.
#pragma once
#include "ptx/types.cuh"

// This warpgroup gives registers back.
template <int N>
__device__ __forceinline__ void decrease_registers_to() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// This warpgroup waits until it gets registers.
template <int N>
__device__ __forceinline__ void increase_registers_to() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
