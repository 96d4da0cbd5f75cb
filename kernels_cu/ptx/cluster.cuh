// PTX ISA: thread-block clusters: rank and size, barrier.cluster, mapa, ld.shared::cluster. sm_90.
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ int cluster_size() {
    int size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// The number of the block's cluster along x.
__device__ __forceinline__ int cluster_index() {
    int index;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return index;
}

// Wait for all threads of the cluster; what they wrote to shared or global memory before is then visible to all of them.
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// The same where the blocks' writers have met at barriers of their own since: the fence of one thread of each block, which says
// so, does for all of them.
__device__ __forceinline__ void cluster_sync_with_one_fence(bool mine) {
    if (mine) asm volatile("fence.acq_rel.cluster;" ::: "memory");
    __syncwarp();
    asm volatile(
        "barrier.cluster.arrive.relaxed.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ float load_cluster_float(uint32_t address) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float4 load_cluster_float4(uint32_t address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
