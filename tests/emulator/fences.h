// Which accesses to shared memory are ordered before which. The machine reports an access that nothing orders, even
// where this run happened to do things in the right order:
//
//   a load          of what another warp stored: a barrier must order the store before it
//   wgmma           of what was stored: a barrier and a fence.proxy.async must; any thread between may have fenced
//   a bulk copy     to where a warp loaded or stored: the same
//
// Each warp has a clock, which goes on at each barrier at which it arrives, and at each fence. A warp knows up to
// which time of each other warp's clock accesses are ordered before what it does next. At a barrier warps pass on what
// they know.
#pragma once
#include <algorithm>
#include <cstdint>

namespace emu {
constexpr int MAX_WARPS = 32;

// What is ordered before what a warp does next: of each warp of the CTA, the loads and stores up to this time of its
// clock.
struct Known {
    uint32_t stored[MAX_WARPS] = {};
    uint32_t fenced[MAX_WARPS] = {};  // the same with a fence.proxy.async behind them: for wgmma and bulk copies

    void join(const Known& other) {
        for (int i = 0; i < MAX_WARPS; ++i) {
            stored[i] = std::max(stored[i], other.stored[i]);
            fenced[i] = std::max(fenced[i], other.fenced[i]);
        }
    }
};

// The last ordinary store to 4 bytes of shared memory. Time 0: there is none, or a bulk copy came after it.
struct LastStore {
    int warp;
    uint32_t time;
};

// When each warp last loaded from, or stored to, 16 bytes of shared memory. Time 0: not since the last bulk copy to
// them.
struct LastAccess {
    uint32_t time[MAX_WARPS] = {};
};
}  // namespace emu
