// Twin of kernels_cu/ptx/named_barrier.cuh.
#pragma once
#include "ptx/types.cuh"

inline void named_barrier_sync(int id, int threads) { emu::barrier_sync(id, threads); }
inline void named_barrier_arrive(int id, int threads) { emu::barrier_arrive(id, threads); }
inline bool named_barrier_any(int id, int threads, bool mine) { return emu::barrier_sync(id, threads, mine).was_any; }
