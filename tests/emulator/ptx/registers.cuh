// Twin of kernels_cu/ptx/registers.cuh.
#pragma once
#include "ptx/types.cuh"

inline uint32_t opaque(uint32_t x) { return x; }
inline uint32_t opaque_value(uint32_t x) { return x; }
inline int read_thread_index() { return emu::thread(); }
inline int read_num_ctas() { return int(emu::grid.x); }
