// PTX ISA: mbarrier.init, .arrive, .arrive.expect_tx, .try_wait.parity, cp.async.mbarrier.arrive.noinc, cp.async.bulk,
// fence.proxy.async. sm_90.
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// One arrival, which releases what this thread has written.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A warp's arrivals. Those of its lanes would take turns, so one arrives for all. With EVERY_LANE_ARRIVES all do: racecheck does
// not see that they have met before (benchmarks/racecheck.py).
#ifdef EVERY_LANE_ARRIVES
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif

// The arrival of a warp whose lanes have met (__syncwarp).
__device__ __forceinline__ void mbarrier_arrive_for_warp(uint32_t barrier, int lane) {
    if (WARP_ARRIVALS == 32 || lane == 0) mbarrier_arrive(barrier);
}

// The same at two barriers at once, those that lanes 0 and 1 name.
__device__ __forceinline__ void mbarrier_arrive_for_warp_at_two(uint32_t barrier, int lane) {
    if constexpr (WARP_ARRIVALS == 32) {
        mbarrier_arrive(__shfl_sync(~0u, barrier, 0));
        mbarrier_arrive(__shfl_sync(~0u, barrier, 1));
    } else {
        if (lane < 2) mbarrier_arrive(barrier);
    }
}

// One arrival, which tells the phase to wait for `bytes` of bulk copies, too.
__device__ __forceinline__ void mbarrier_arrive_expecting(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// One arrival, once all cp.async that this thread has started so far are done.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Start to copy `bytes` from global to shared memory, all multiples of 16, which will count at a barrier.
__device__ __forceinline__ void copy_in_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

// Wait for the end of the phase of the given parity.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra done;\n"
        "bra again;\n"
        "done:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// fence.mbarrier_init: makes initialised barriers visible.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// fence.proxy.async: orders accesses of shared memory by ordinary instructions before those of wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
