// The emulated machine, as kernels see it.
//
//   emulator.py      compiles kernels with g++ and launches them; EmulatedGPU stands in for a GPU
//   kernel.cpp       a kernel as a shared library
//   cuda.h           CUDA's language: keywords, threadIdx, __shfl_sync, atomicAdd, ...
//   ptx/             the instructions; each header is the twin of the one of its name in kernels_cu/ptx
//   machine.h, .cpp  what both are made of: threads, barriers, asynchronous copies, launches
//   wgmma_queue.h    wgmma that were issued and are not done
//   fences.h         which stores to shared memory a warp may read
//
// A thread of a CTA is a fiber, a stack of its own on the one OS thread. It runs until it waits: for its warp, for a
// barrier, for a word in memory that changes. Nothing interrupts it between two waits. Which warp goes on is drawn from
// the run's seed, and so is when an asynchronous copy is done: at once, later, or at the last moment that the kernel
// allows. CTAs run one after the other; further ones start when those that run wait for them.
//
// The .bss of a kernel's library is the shared memory of a CTA. Each CTA that runs has a copy of the library, and so
// shared memory of its own, which is poisoned before it starts. A shared address is the distance from the .bss, as PTX
// has it; an address in another CTA of the cluster has that CTA's rank + 1 in its upper byte.
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

// Where a kernel's library has its shared memory: all of it, and the array that the kernel declares as
// `extern __shared__`, which is as large as a CTA's may be.
struct SharedMemory {
    char *begin, *end;
    char *array, *array_end;
};

// A copy that was started, or an arrival at an mbarrier that waits for the copies before it (`arrives`).
struct Copy {
    uint32_t to;
    const void* from;
    int bytes;
    bool valid;  // false: zeros are written
    bool arrives;
    uint32_t barrier;
    int group;
};

struct Thread {
    void* stack_pointer;   // while it does not run
    const uint32_t* word;  // it waits while (*word & mask) == value; null: it does not wait
    uint32_t mask, value;
    int index;              // threadIdx.x
    bool done;              // it has returned
    bool polls;             // it looks at memory again and again: it goes on when no other thread can
    const char* waits_for;  // for messages
    Cta* cta;
    std::vector<Copy> copies;  // those that are under way, oldest first
    int groups;                // of copies that it has committed
    uint32_t cluster_turn;     // of its last arrival at the cluster's barrier
    WgmmaQueue* wgmmas;
    char* stack;
};

// Lanes of a warp that exchange numbers.
struct Meeting {
    uint32_t lanes, arrived;  // masks
    uint32_t turn;            // goes up when all have arrived
    uint64_t numbers[2][32];  // of this turn and of the last one, by turn % 2 and lane
};

struct Barrier {
    uint32_t turn;  // goes up when all have arrived
    int arrived, expected;
    bool any, all;          // of the values that threads pass
    bool was_any, was_all;  // of the last turn
    Known known;            // to those that have arrived
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
    std::vector<Copy> bulk;              // bulk copies that are under way
    std::vector<LastStore> stores;       // by 4 bytes of shared memory
    std::vector<LastAccess> accesses;    // by 16 bytes
    Known known[MAX_WARPS];              // to each warp
    std::unordered_map<uint32_t, Known> at_mbarrier;
    Known at_cluster_barrier;
    std::vector<Thread*> threads;
    int alive;                  // threads that have not returned
    int image;                  // its copy of the library
    uint32_t poison;            // what its memory held at first
    char *beyond, *beyond_end;  // memory that the kernel did not ask for
};

extern Thread* current;
extern uint32_t ticks;  // reads of gridDim: cuda.h
extern Dim grid;
extern int threads_of_cta;

inline int thread() { return current->index; }  // threadIdx.x
inline int lane() { return current->index % 32; }

// The warp's lanes of `mask` meet here. Returns the numbers that they pass, by lane; they last until the next call.
const uint64_t* exchange(uint64_t mine, uint32_t mask = ~0u);

// Ends the run: message, CTA and thread.
[[noreturn]] void fail(const char* message);

// Where a shared address, of this CTA or of another one of its cluster, lies on the host. Fails outside of shared memory.
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
// last store before it; so does a bulk copy to where nothing orders the last loads and stores before it.
char* stored(uint32_t address, int bytes);
char* loaded(uint32_t address, int bytes);
const char* loaded_by_wgmma(uint32_t address);
void fence_proxy_async();

inline uint32_t shared_address(const void* p) { return uint32_t(static_cast<const char*>(p) - current->cta->base); }

// Lets other threads run: in loops that wait for memory to change.
void yield();

// Waits while a word has this value.
void wait_for_change(const uint32_t* word, uint32_t value, const char* what);

// A random number below n, of the run's seed: for what hardware leaves open, as when an asynchronous copy is done.
uint32_t draw(uint32_t n);

// Those of this thread: wgmma_queue.h.
inline WgmmaQueue& wgmma_queue() { return *current->wgmmas; }

// Every thread that multiplies matrices says so, once an instruction.
void count_product();

// Barriers 0 (__syncthreads) to 15 of the CTA. barrier_sync returns one whose was_any and was_all are those of `value`.
void barrier_arrive(int id, int threads);
Barrier& barrier_sync(int id, int threads, bool value = false);
int threads_left();  // of the CTA: those that have not returned

// mbarriers lie in their 8 bytes of shared memory.
void mbarrier_init(uint32_t barrier, int arrivals);
void mbarrier_arrive(uint32_t barrier, int expected_bytes = 0);
bool mbarrier_done(uint32_t barrier, uint32_t parity);
void mbarrier_wait(uint32_t barrier, uint32_t parity);

// Asynchronous copies into shared memory.
void copy_async(uint32_t to, const void* from, int bytes, bool valid);
void copy_commit();
void copy_wait(int newest_groups);  // until at most these are under way
void copy_wait_all();
void arrive_after_copies(uint32_t barrier);
void copy_in_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier);

void cluster_arrive();
void cluster_wait();
}  // namespace emu
