// PTX ISA: griddepcontrol: what a launch that overlaps the launch before it ("programmatic dependent launch") owes to
// that launch. sm_90; on older GPUs launches do not overlap, and these do nothing.
#pragma once
#include "ptx/types.cuh"

// Wait until the launches before this one are done and what they wrote is visible. Before this, a kernel must not
// touch global memory that an earlier launch writes or still reads.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all CTAs have called this, the CTAs of the next launch may start. They wait in wait_for_earlier_kernels.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
