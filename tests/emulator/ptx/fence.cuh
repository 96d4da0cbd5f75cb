// Twin of kernels_cu/ptx/fence.cuh, where memory has one order.
#pragma once

inline void fence_proxy_async() {}
inline void fence_cluster() {}
