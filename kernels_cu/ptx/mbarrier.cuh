// PTX ISA: mbarrier.init, .arrive, .arrive.expect_tx, .test_wait.parity, .try_wait.parity; fence.mbarrier_init;
// cp.async.mbarrier.arrive.noinc; cp.async.bulk. sm_90.
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes initialised barriers visible.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival. What this thread has written before is visible to those that wait.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The number of arrivals with which a warp arrives. Arrivals of several lanes are serialised, so one lane arrives for
// all. With EVERY_LANE_ARRIVES all lanes arrive: racecheck does not see that they have met before
// (benchmarks/racecheck.py).
#ifdef EVERY_LANE_ARRIVES
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif

// A warp's arrival. Its lanes must have met (__syncwarp).
__device__ __forceinline__ void mbarrier_arrive_for_warp(uint32_t barrier, int lane) {
    if (WARP_ARRIVALS == 32 || lane == 0) mbarrier_arrive(barrier);
}

// A warp's arrival at the barrier BYTES_BEHIND bytes behind `barrier`. One lane arrives; the lanes need not have met.
template <int BYTES_BEHIND>
__device__ __forceinline__ void mbarrier_arrive_elected(uint32_t barrier) {
    if constexpr (WARP_ARRIVALS == 32) {
        mbarrier_arrive(barrier + BYTES_BEHIND);
    } else {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "elect.sync _|p, 0xffffffff;\n"
            "@p mbarrier.arrive.shared::cta.b64 _, [%0 + %1];\n"
            "}\n" ::"r"(barrier),
            "n"(BYTES_BEHIND)
            : "memory");
    }
}

// One arrival. The phase then also waits for `bytes` of bulk copies.
__device__ __forceinline__ void mbarrier_arrive_expecting(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The same for a warp. Its lanes must have met.
__device__ __forceinline__ void mbarrier_arrive_expecting_for_warp(uint32_t barrier, int bytes, int lane) {
    if (lane == 0) {
        mbarrier_arrive_expecting(barrier, bytes);
    } else if (WARP_ARRIVALS == 32) {
        mbarrier_arrive(barrier);
    }
}

// One arrival, which happens once all cp.async that this thread has started so far are done.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// cp.async.bulk: starts to copy `bytes` from global to shared memory. Both addresses and the count are multiples of
// 16. `barrier` counts the bytes that have arrived.
__device__ __forceinline__ void copy_in_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The same under a cache policy (ptx/cache_policy.cuh).
__device__ __forceinline__ void copy_in_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier,
                                             uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// Whether the phase of the given parity has ended.
__device__ __forceinline__ bool mbarrier_done(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Waits for the end of the phase of the given parity. Before sm_90 there is only a test that does not suspend the
// thread.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
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
#else
    while (!mbarrier_done(barrier, parity)) {
    }
#endif
}
