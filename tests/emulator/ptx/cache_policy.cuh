// Twin of kernels_cu/ptx/cache_policy.cuh, which has no caches.
#pragma once
#include "ptx/types.cuh"

inline uint64_t evict_first() { return 1; }
inline uint64_t evict_normal() { return 2; }
inline uint64_t evict_half_first() { return 3; }
