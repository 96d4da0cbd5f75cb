// The emulated machine, as kernels see it.
//
//   emulator.py      compiles kernels with g++ and launches them; EmulatedGPU stands in for a GPU
//   kernel.cpp       a kernel as a shared library
//   cuda.h           CUDA C++: keywords, threadIdx, __shfl_sync, atomicAdd, ...
//   ptx/             the instructions; each header is the twin of the one of its name in kernels_cu/ptx
//   machine.h, .cpp  what cuda.h and ptx/ are made of: threads, barriers, asynchronous copies, launches
//   wgmma_queue.h    wgmma instructions that were issued and are not done
//   fences.h         which accesses to shared memory are ordered before which
//
// Threads. A thread of a CTA is a fiber: it has its own stack, and all fibers share one OS thread. It runs until it
// waits, for its warp, for a barrier, or for a word in memory to change. Nothing interrupts it between two waits.
// Which warp runs next is drawn from the run's seed.
//
// Asynchronous copies are done at once, later, or at the last moment that the kernel allows: drawn from the seed, too.
//
// CTAs. One cluster of CTAs runs at a time. Further ones start, up to the SMs of the machine, only when those that run
// cannot go on without them.
//
// Shared memory of a CTA is the .bss of the kernel's library. Each CTA that runs has a copy of the library, and so
// shared memory of its own, which is poisoned before it starts. A shared address is the distance from the .bss, as in
// PTX. An address in another CTA of the cluster has that CTA's rank + 1 in its upper byte.
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

// Where a kernel's library has its shared memory: all of it, and in it the array that the kernel declares as
// `extern __shared__`. The array has the most bytes that a CTA may have.
struct SharedMemory {
    char *begin, *end;
    char *array, *array_end;
};

// An asynchronous copy that was started. `arrives`: no copy, but an arrival at an mbarrier behind the thread's copies.
struct Copy {
    uint32_t to;
    const void* from;
    int bytes;
    bool valid;  // false: it writes zeros
    bool arrives;
    uint32_t barrier;  // where the arrival is, or a bulk copy's bytes count
    int group;         // of cp.async, numbered by the thread
};

struct Thread {
    void* stack_pointer;   // while another thread runs
    const uint32_t* word;  // it waits while (*word & mask) == value; null: it does not wait
    uint32_t mask, value;
    int index;              // threadIdx.x
    bool done;              // it has returned
    bool polls;             // it looks at memory again and again: it runs when no other thread can
    const char* waits_for;  // for error messages
    Cta* cta;
    std::vector<Copy> copies;  // under way, oldest first
    int groups;                // of copies, that it has committed
    uint32_t cluster_turn;     // of the cluster's barrier when it last arrived there
    WgmmaQueue* wgmmas;
    char* stack;
};

// Where lanes of a warp exchange numbers: __shfl_sync, __syncwarp and the like, for one mask.
struct Meeting {
    uint32_t lanes, arrived;  // masks
    uint32_t turn;            // goes up when all have arrived
    uint64_t numbers[2][32];  // [turn % 2][lane]: of this turn and the last one
};

// __syncthreads or a named barrier.
struct Barrier {
    uint32_t turn;  // goes up when all have arrived
    int arrived, expected;
    bool any, all;          // whether any, and all, of the values that threads passed are true
    bool was_any, was_all;  // in the last turn
    Known known;            // to threads that have arrived
};

struct Cta {
    char* base;         // shared address 0
    char *start, *end;  // its shared memory
    Dim block;
    int rank;
    std::vector<Cta*>* cluster;
    struct ClusterBarrier {
        uint32_t turn;
        int arrived;
    }* cluster_barrier;
    Barrier barriers[16];
    std::vector<Meeting*> meetings[32];  // of each warp, one for each mask
    std::vector<Copy> bulk;              // bulk copies under way
    std::vector<LastStore> stores;       // by 4 bytes of shared memory
    std::vector<LastAccess> accesses;    // by 16 bytes
    Known known[MAX_WARPS];              // to each warp
    std::unordered_map<uint32_t, Known> at_mbarrier;
    Known at_cluster_barrier;
    std::vector<Thread*> threads;
    int alive;                  // threads that have not returned
    int image;                  // its copy of the library
    uint32_t poison;            // the word that its memory was filled with
    char *beyond, *beyond_end;  // the part of `array` that the kernel did not ask for
};

extern Thread* current;
extern uint32_t ticks;  // reads of gridDim: cuda.h
extern Dim grid;
extern int threads_of_cta;

inline int thread() { return current->index; }  // threadIdx.x
inline int lane() { return current->index % 32; }

// The warp's lanes of `mask` wait for each other. Returns the numbers that they pass, by lane, valid until the next
// call.
const uint64_t* exchange(uint64_t mine, uint32_t mask = ~0u);

// Ends the run with an error of this message, the CTA and the thread.
[[noreturn]] void fail(const char* message);

// The host address of a shared address, of this CTA or of another one of its cluster. Fails outside of shared memory.
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

// The host address of an ordinary store, of a load, and of a load of 16 bytes by wgmma. They note the access, and
// loads fail if nothing orders the last store before them (fences.h). copy_in_bulk checks in the same way.
char* stored(uint32_t address, int bytes);
char* loaded(uint32_t address, int bytes);
const char* loaded_by_wgmma(uint32_t address);
void fence_proxy_async();

inline uint32_t shared_address(const void* p) { return uint32_t(static_cast<const char*>(p) - current->cta->base); }

// Lets other threads run. For loops that wait for memory to change.
void yield();

// Waits while a word has this value. `what` is for error messages.
void wait_for_change(const uint32_t* word, uint32_t value, const char* what);

// A random number below n, from the run's seed. For what hardware leaves open, such as when an asynchronous copy is
// done.
uint32_t draw(uint32_t n);

// This thread's wgmma instructions (wgmma_queue.h).
inline WgmmaQueue& wgmma_queue() { return *current->wgmmas; }

// Called once by each thread of each instruction that multiplies matrices.
void count_product();

// Barriers 0 (__syncthreads) to 15 of the CTA. `threads` is how many a turn needs. barrier_sync returns the barrier,
// whose was_any and was_all are those of the `value`s that threads passed.
void barrier_arrive(int id, int threads);
Barrier& barrier_sync(int id, int threads, bool value = false);
int threads_left();  // threads of the CTA that have not returned

// mbarriers lie in their 8 bytes of shared memory.
void mbarrier_init(uint32_t barrier, int arrivals);
void mbarrier_arrive(uint32_t barrier, int expected_bytes = 0);
bool mbarrier_done(uint32_t barrier, uint32_t parity);
void mbarrier_wait(uint32_t barrier, uint32_t parity);

// Asynchronous copies into shared memory.
void copy_async(uint32_t to, const void* from, int bytes, bool valid);
void copy_commit();
void copy_wait(int newest_groups);  // until at most the newest groups are under way
void copy_wait_all();
void arrive_after_copies(uint32_t barrier);
void copy_in_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier);

void cluster_arrive();
void cluster_wait();
}  // namespace emu
