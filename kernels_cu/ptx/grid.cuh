// PTX ISA: griddepcontrol: what a launch that overlaps its predecessor (jit.py, Kernel.overlaps) owes to it. sm_90; launches
// for older GPUs do not overlap.
#pragma once
#include "ptx/types.cuh"

// Wait until the launches before this one are done and what they wrote can be read. Before it, no global memory that a
// kernel has written, or still reads, may be touched.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From when all blocks have said this, those of the next launch may start, and wait.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
