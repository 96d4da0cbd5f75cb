// Twin of kernels_cu/ptx/cluster.cuh.
#pragma once
#include "ptx/fence.cuh"
#include "ptx/types.cuh"

inline int cluster_rank() { return emu::current->cta->rank; }
inline int cluster_size() { return int(emu::current->cta->cluster->size()); }
inline int cluster_index() { return int(emu::current->cta->block.x) / cluster_size(); }
inline void cluster_arrive() { emu::cluster_arrive(); }
inline void cluster_wait() { emu::cluster_wait(); }
inline void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
inline void cluster_sync_with_one_fence(bool fences) {
    __syncwarp();
    cluster_sync();
}
inline uint32_t cluster_address(uint32_t address, int rank) {
    if (address >> 24 || rank < 0 || rank >= cluster_size()) emu::fail("mapa of no address of this cluster");
    return address | uint32_t(rank + 1) << 24;
}
inline uint32_t load_cluster_4(uint32_t address) { return *emu::aligned<uint32_t>(emu::shared(address)); }
inline Vec8 load_cluster_8(uint32_t address) { return *emu::aligned<Vec8>(emu::shared(address)); }
