// Twin of kernels_cu/ptx/mbarrier.cuh.
#pragma once
#include "ptx/types.cuh"

inline void mbarrier_init(uint32_t barrier, int arrivals) { emu::mbarrier_init(barrier, arrivals); }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) { emu::mbarrier_arrive(barrier); }

#ifdef EVERY_LANE_ARRIVES
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif

inline void mbarrier_arrive_for_warp(uint32_t barrier, int lane) {
    if (WARP_ARRIVALS == 32 || lane == 0) mbarrier_arrive(barrier);
}

template <int BYTES_BEHIND>
inline void mbarrier_arrive_elected(uint32_t barrier) {
    if (WARP_ARRIVALS == 1) emu::exchange(0);  // elect.sync
    if (WARP_ARRIVALS == 32 || emu::lane() == 0) mbarrier_arrive(barrier + BYTES_BEHIND);
}

inline void mbarrier_arrive_expecting(uint32_t barrier, int bytes) { emu::mbarrier_arrive(barrier, bytes); }
inline void mbarrier_arrive_expecting_for_warp(uint32_t barrier, int bytes, int lane) {
    if (lane == 0) {
        mbarrier_arrive_expecting(barrier, bytes);
    } else if (WARP_ARRIVALS == 32) {
        mbarrier_arrive(barrier);
    }
}
inline void mbarrier_arrive_after_copies(uint32_t barrier) { emu::arrive_after_copies(barrier); }
inline void copy_in_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    emu::copy_in_bulk(to, from, bytes, barrier);
}
inline void copy_in_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t policy) {
    emu::copy_in_bulk(to, from, bytes, barrier);
}
inline bool mbarrier_done(uint32_t barrier, uint32_t parity) { return emu::mbarrier_done(barrier, parity); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) { emu::mbarrier_wait(barrier, parity); }
