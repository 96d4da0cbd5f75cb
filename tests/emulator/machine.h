// The emulated machine, as kernels on the CPU see it: cuda.h (the language) and ptx/ (the instructions) are made of it.
//
// A thread of a CTA is a fiber, a stack of its own on the one OS thread. It runs until it waits: for its warp, for a
// barrier, for a word in memory that changes. So what stands between two waits is not interrupted. Which warp goes on
// is drawn from the run's seed, and so is when an asynchronous copy is done: at once, later, or at the last moment
// that the kernel allows. CTAs run one after the other; further ones start when those that run wait for them.
//
// A kernel is a shared library whose .bss is the shared memory of a CTA. Each CTA that runs has a copy of the library,
// so CTAs of a cluster do not share it. A shared address is the distance from the .bss, as PTX has it; an address in
// another CTA of the cluster has that CTA's rank + 1 in its upper byte. Before a CTA starts, its memory is poisoned.
#pragma once
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "fences.h"

namespace emu {
struct Dim {
    uint32_t x, y, z;
};

struct Cta;
struct WgmmaQueue;

// A copy that was started, or an arrival at an mbarrier that waits for the copies before it (`arrives`).
struct Copy {
    uint32_t to;
    const void* from;
    int bytes;
    bool valid, arrives;
    uint32_t barrier;
    int group;
};

struct Thread {
    void* stack_pointer;
    const uint32_t* word;  // waits while (*word & mask) == value; null: does not wait
    uint32_t mask, value;
    int index;  // threadIdx.x
    bool done, polls;
    const char* waits_for;
    Cta* cta;
    std::vector<Copy> copies;  // those that are under way, oldest first
    int groups;                // committed ones
    uint32_t cluster_turn;     // of its last arrival at the cluster's barrier
    WgmmaQueue* wgmmas;
    char* stack;
};

struct Meeting {  // lanes of a warp that exchange numbers
    uint32_t lanes, arrived, turn;
    uint64_t numbers[2][32];
};

struct Barrier {
    uint32_t turn;
    int arrived, expected;
    bool any, all, was_any, was_all;
    Known known;  // to those that have arrived
};

struct Cta {
    char* base;         // of shared addresses
    char *start, *end;  // of its shared memory
    Dim block;
    int rank;
    std::vector<Cta*>* cluster;
    struct ClusterBarrier {
        uint32_t turn;
        int arrived;
    }* cluster_barrier;
    Barrier barriers[16];
    std::vector<Meeting*> meetings[32];  // of each warp; the first is that of all lanes
    std::vector<Copy> bulk;
    std::vector<LastStore> stores;  // by 4 bytes of shared memory
    Known known[MAX_WARPS];         // to each warp
    std::unordered_map<uint32_t, Known> at_mbarrier;
    Known at_cluster_barrier;
    std::vector<Thread*> threads;
    int alive;
    int image;
    uint32_t poison;
    char *beyond, *beyond_end;  // memory that the kernel did not ask for
};

extern Thread* current;
extern uint32_t ticks;
extern Dim grid;
extern int threads_of_cta;

inline int thread() { return current->index; }  // threadIdx.x
inline int lane() { return current->index % 32; }

// The warp's lanes of `mask` meet here. The numbers that they pass, by lane, good until the next call.
const uint64_t* exchange(uint64_t mine, uint32_t mask = ~0u);

// Ends the run: message, CTA and thread.
[[noreturn]] void fail(const char* message);

// Where a shared address of this CTA, or of one of its cluster, lies on the host. Fails outside of shared memory.
inline char* shared(uint32_t address) {
    const Cta* cta = current->cta;
    if (address >> 24) {
        if (address >> 24 > cta->cluster->size()) fail("an address outside of shared memory");
        cta = (*cta->cluster)[(address >> 24) - 1];
    }
    char* at = cta->base + (address & 0xffffff);
    if (__builtin_expect(at < cta->start || at >= cta->end, 0)) fail("an address outside of shared memory");
    return at;
}

// Where an ordinary store goes, and a load comes from. A load, and wgmma's of 16 bytes, fails if nothing orders the
// last store before it.
char* stored(uint32_t address, int bytes);
char* loaded(uint32_t address, int bytes);
const char* loaded_by_wgmma(uint32_t address);
void fence_proxy_async();

inline uint32_t shared_address(const void* p) { return uint32_t(static_cast<const char*>(p) - current->cta->base); }

// Lets other fibers run.
void yield();

// Waits while a word has this value.
void wait_for_change(const uint32_t* word, uint32_t value, const char* what);

// A random number below n, of the run's seed: for what hardware leaves open, as when an asynchronous copy is done.
uint32_t any_of(uint32_t n);

// wgmma that were issued by this thread and are not done: wgmma_queue.h.
inline WgmmaQueue& wgmma_queue() { return *current->wgmmas; }

// Barriers 0 (__syncthreads) to 15 of the CTA.
void barrier_arrive(int id, int threads);
Barrier& barrier_sync(int id, int threads, bool value = false);  // its was_any and was_all are those of `value`
int threads_left();                                              // of the CTA: those that have not returned

// mbarriers lie in their 8 bytes of shared memory.
void mbarrier_init(uint32_t barrier, int arrivals);
void mbarrier_arrive(uint32_t barrier, int expected_bytes = 0);
bool mbarrier_done(uint32_t barrier, uint32_t parity);
void mbarrier_wait(uint32_t barrier, uint32_t parity);

// Asynchronous copies into shared memory.
void copy_async(uint32_t to, const void* from, int bytes, bool valid);
void copy_commit();
void copy_wait(int newest_groups);  // that may be under way
void copy_wait_all();
void arrive_after_copies(uint32_t barrier);
void copy_in_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier);

void cluster_arrive();
void cluster_wait();
}  // namespace emu
