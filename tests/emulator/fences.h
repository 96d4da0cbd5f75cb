// Which ordinary stores to shared memory a warp may read: those of another warp that a barrier orders before the load, and
// wgmma those that a fence.proxy.async, too, orders before it. Bulk copies come to where all loads and stores before are
// ordered so. The fence may be one of any thread on the way. So warps keep clocks, and pass on what they know where they
// meet. Errors show whatever the order of the run.
#pragma once
#include <algorithm>
#include <cstdint>

namespace emu {
constexpr int MAX_WARPS = 32;

// What is ordered before what a warp does next: of each warp of the CTA, loads and stores up to this time of its own
// clock.
struct Known {
    uint32_t stored[MAX_WARPS] = {};
    uint32_t fenced[MAX_WARPS] = {};  // of these wgmma may read, and to them bulk copies may come

    void join(const Known& other) {
        for (int i = 0; i < MAX_WARPS; ++i) {
            stored[i] = std::max(stored[i], other.stored[i]);
            fenced[i] = std::max(fenced[i], other.fenced[i]);
        }
    }
};

// The last ordinary store to 4 bytes of shared memory. Time 0: none, or a bulk copy came after it.
struct LastStore {
    int warp;
    uint32_t time;
};

// When each warp last loaded from 16 bytes of shared memory, or stored to them. Time 0: not since a bulk copy came.
struct LastAccess {
    uint32_t time[MAX_WARPS] = {};
};
}  // namespace emu
