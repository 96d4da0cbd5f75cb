// Twin of kernels_cu/ptx/prefetch.cuh, which has no caches.
#pragma once
#include "ptx/types.cuh"

inline void prefetch_in_bulk(const void*, int) {}
