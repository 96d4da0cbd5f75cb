// PTX ISA: griddepcontrol, for launches that overlap the launch before them ("programmatic dependent launch"). sm_90;
// on older GPUs launches do not overlap, and these functions do nothing.
#pragma once
#include "ptx/types.cuh"

// Waits until the launches before this one are done and what they wrote is visible. Before this, a kernel must not
// touch global memory that an earlier launch writes or still reads.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all CTAs have called this, CTAs of the next launch may start. They then wait in wait_for_earlier_kernels.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
