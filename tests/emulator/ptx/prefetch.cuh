// Twin of kernels_cu/ptx/prefetch.cuh: there are no caches, but what is brought must be there.
#pragma once
#include "ptx/types.cuh"

inline void prefetch_in_bulk(const void* from, int bytes) {
    if (bytes % 16 || bytes <= 0 || reinterpret_cast<uintptr_t>(from) % 16) emu::fail("a misaligned bulk prefetch");
    for (int i = 0; i < bytes; i += 16) (void)*static_cast<const volatile char*>(static_cast<const char*>(from) + i);
}
