// Twin of kernels_cu/ptx/global.cuh.
#pragma once
#include "ptx/types.cuh"

inline Vec16 load_in_order_16(const float* from, bool valid) {
    return valid ? *emu::aligned<const Vec16>(from) : Vec16{0, 0, 0, 0};
}
inline float load_in_order(const float* from, bool valid, float otherwise) { return valid ? *from : otherwise; }

// Loads that may wait for another CTA let others run.
inline uint32_t load_relaxed(const void* from) {
    emu::yield();
    return *emu::aligned<const uint32_t>(from);
}
inline uint64_t load_acquire(const uint64_t* from) {
    emu::yield();
    return *emu::aligned<const uint64_t>(from);
}
inline void store_relaxed(uint64_t* to, uint64_t v) { *emu::aligned<uint64_t>(to) = v; }
inline void store_release(uint64_t* to, uint64_t v) { *emu::aligned<uint64_t>(to) = v; }
inline void store_16(void* to, const Vec16& v) { *emu::aligned<Vec16>(to) = v; }
