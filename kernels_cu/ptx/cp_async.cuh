// PTX ISA: cp.async, cp.async.commit_group, cp.async.wait_group, cp.async.wait_all. sm_80.
#pragma once
#include "ptx/types.cuh"

// cp.async.cg: 16 bytes from global to shared memory past L1. If `valid` is false, zeros are written and nothing is
// read.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// The same under a cache policy (ptx/cache_policy.cuh).
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}

// cp.async.ca: the same for 8 bytes.
__device__ __forceinline__ void cp_async_8(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0) : "memory");
}

// cp.async.ca: the same for 4 bytes.
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// cp.async.commit_group: the copies that this thread has started since the last commit become one group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: waits until at most N of this thread's newest groups are in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// cp.async.wait_all: waits until all copies that this thread has started are done, committed or not.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
