// PTX ISA: fence.proxy.async, fence.acq_rel.cluster.
#pragma once

// Orders this thread's ordinary accesses to shared memory before later accesses of wgmma and bulk copies. sm_90.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Releases and acquires at the scope of the cluster. sm_90.
__device__ __forceinline__ void fence_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
