// PTX ISA: thread-block clusters: %cluster_ctarank, %cluster_nctarank, %clusterid, barrier.cluster, mapa,
// ld.shared::cluster. sm_90.
#pragma once
#include "ptx/fence.cuh"
#include "ptx/types.cuh"

// This CTA's number in its cluster.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// CTAs of the cluster.
__device__ __forceinline__ int cluster_size() {
    int size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// The cluster's number along x.
__device__ __forceinline__ int cluster_index() {
    int index;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return index;
}

// Waits for all threads of the cluster. What they wrote before to shared or global memory is then visible to all of
// them.
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// The same in two steps. Between them, a thread must not touch what others wait to reuse.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// As cluster_sync, but only one thread of a CTA fences, the one that passes true. The threads that wrote must have met
// that thread at a barrier of their CTA.
__device__ __forceinline__ void cluster_sync_with_one_fence(bool fences) {
    if (fences) fence_cluster();
    __syncwarp();
    asm volatile(
        "barrier.cluster.arrive.relaxed.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// The same address in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ uint32_t load_cluster_4(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ Vec8 load_cluster_8(uint32_t address) {
    Vec8 v;
    asm volatile("ld.shared::cluster.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}
