// The wgmma instructions of a thread that were issued and are not done. A group of them is done when the last thread
// of the warpgroup commits it or, as the seed has it, only when a wait asks for it. Groups are done in order.
#pragma once
#include <deque>
#include <utility>
#include <vector>

#include "machine.h"

namespace emu {
struct Wgmma {
    void (*run)(const Wgmma&);
    float* c;               // the thread's accumulators
    uint64_t a, b;          // descriptors of operands in shared memory
    float a_registers[64];  // A in registers: the thread's two rows, one behind the other
};

struct WgmmaQueue {
    std::vector<Wgmma> open;  // not committed
    std::deque<std::vector<Wgmma>> groups;
    uint32_t committed = 0, done = 0;  // numbers of groups

    void run_until(uint32_t group) {
        for (; done < group; ++done, groups.pop_front())
            for (const Wgmma& product : groups.front()) product.run(product);
    }
};

// wgmma is an instruction of a whole warpgroup. So this waits until all its threads have committed group number
// `group`, and then does the groups up to it for all of them.
inline void finish_wgmmas(uint32_t group) {
    Thread* const me = current;
    Thread* const* threads = &me->cta->threads[me->index / 128 * 128];
    for (int i = 0; i < 128; ++i) {
        const uint32_t& committed = threads[i]->wgmmas->committed;
        while (committed < group) wait_for_change(&committed, committed, "wgmma of its warpgroup");
    }
    for (int i = 0; i < 128; ++i) {
        current = threads[i];
        threads[i]->wgmmas->run_until(group);
    }
    current = me;
}

inline void commit_wgmmas() {
    WgmmaQueue& mine = wgmma_queue();
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
    ++mine.committed;
    bool last = true;  // this thread is the last of the warpgroup to commit the group
    Thread* const* threads = &current->cta->threads[current->index / 128 * 128];
    for (int i = 0; i < 128; ++i) last &= threads[i]->wgmmas->committed >= mine.committed;
    if (last && draw(2)) finish_wgmmas(mine.committed);
}

// Waits until at most `newest` groups are not done.
inline void wait_for_wgmmas(uint32_t newest) {
    const uint32_t committed = wgmma_queue().committed;
    if (committed > newest) finish_wgmmas(committed - newest);
}
}  // namespace emu
