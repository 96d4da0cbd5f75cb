// Twin of kernels_cu/ptx/fence.cuh, where memory has one order. It knows which stores wgmma may read.
#pragma once
#include "machine.h"

inline void fence_proxy_async() { emu::fence_proxy_async(); }
inline void fence_cluster() {}
