// Twin of kernels_cu/ptx/cp_async.cuh.
#pragma once
#include "ptx/types.cuh"

inline void cp_async_16(uint32_t to, const void* from, bool valid) { emu::copy_async(to, from, 16, valid); }
inline void cp_async_16(uint32_t to, const void* from, bool valid, uint64_t policy) {
    emu::copy_async(to, from, 16, valid);
}
inline void cp_async_8(uint32_t to, const void* from, bool valid) { emu::copy_async(to, from, 8, valid); }
inline void cp_async_4(uint32_t to, const void* from, bool valid) { emu::copy_async(to, from, 4, valid); }
inline void cp_async_commit() { emu::copy_commit(); }
template <int N>
inline void cp_async_wait() {
    emu::copy_wait(N);
}
inline void cp_async_wait_all() { emu::copy_wait_all(); }
