// PTX ISA: createpolicy.fractional. sm_80.
#pragma once
#include "ptx/types.cuh"

// For data that is read once: its lines leave L2 before others do.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// The policy of accesses without a policy.
__device__ __forceinline__ uint64_t evict_normal() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Half of the lines leave L2 before others do.
__device__ __forceinline__ uint64_t evict_half_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_normal.L2::evict_first.b64 %0, 0.5;" : "=l"(policy));
    return policy;
}
