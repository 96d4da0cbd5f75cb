// PTX ISA: fence.proxy.async, fence.acq_rel.cluster.
#pragma once

// Orders this thread's ordinary accesses to shared memory before later accesses by wgmma and bulk copies. sm_90.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A release and acquire fence at cluster scope. sm_90.
__device__ __forceinline__ void fence_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
