// wgmma of one thread that were issued and are not done. A group is done at its commit or, as chance has it, only when
// a wait asks for it; groups are done in order.
#pragma once
#include <deque>
#include <utility>
#include <vector>

#include "machine.h"

namespace emu {
struct Wgmma {
    void (*run)(const Wgmma&);
    float* c;                  // accumulators of this thread
    uint64_t a, b;             // operands in shared memory
    float a_registers[2][16];  // A in registers: the thread's two rows
};

struct WgmmaQueue {
    std::vector<Wgmma> open;  // not committed
    std::deque<std::vector<Wgmma>> groups;

    void commit() {
        groups.push_back(std::move(open));
        open.clear();
        if (any_of(2)) wait(0);
    }

    // Until at most `newest` groups are left.
    void wait(size_t newest) {
        for (; groups.size() > newest; groups.pop_front())
            for (const Wgmma& product : groups.front()) product.run(product);
    }

    bool idle() const { return open.empty() && groups.empty(); }
};
}  // namespace emu
