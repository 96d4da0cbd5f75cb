// The machine: fibers, their scheduler, barriers, asynchronous copies, launches.
#include "machine.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>

#include "wgmma_queue.h"

// --- fibers -------------------------------------------------------------------------------------------------------

// Saves this fiber's stack pointer in *from, and continues the fiber whose stack pointer is `to`.
extern "C" void emu_switch(void** from, void* to);
extern "C" void emu_begin();

#if defined(__x86_64__)
asm(R"(
.globl emu_switch
.hidden emu_switch
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
// The words on a new fiber's stack: the six that emu_switch pops, the address that it returns to, and one for
// alignment.
constexpr int RETURN_AT = 6, FRAME = 8;
#else
#error "the emulator switches stacks on x86-64"
#endif

namespace emu {
Thread* current;
uint32_t ticks;
Dim grid;
int threads_of_cta;

namespace {
constexpr size_t STACK_BYTES = 256 << 10;
constexpr int MAX_IDLE = 20 << 20;                          // polls in a row while nothing else happens
constexpr uint32_t LIVE = 0x5a000000, NO_BYTES = 0x800000;  // in an mbarrier's second word

// A copy of a kernel's library, which one CTA at a time uses.
struct Image {
    void* handle = nullptr;
    void (*body)(const void*) = nullptr;
    SharedMemory memory = {};
};

struct Kernel {
    std::string path;  // of its library
    std::vector<Image> images;
    int threads = 0, shared_bytes = 0;
};

// A launch.
struct Run {
    Kernel* kernel;
    const void* params;
    uint32_t clusters, cluster_size, started;
    size_t most_alive;           // CTAs
    std::vector<Thread*> order;  // of the CTAs that run, warp by warp, in the order of their turns
    std::vector<Cta*> ctas;      // that run
    size_t at;                   // the current thread's index in `order`
    long idle;                   // polls since something else happened
    bool copies;                 // some may be under way
    std::string error;
    uint64_t products;  // calls of count_product
} run;

void* scheduler_stack;
std::mt19937 numbers;
std::vector<char*> free_stacks;
std::vector<int> free_images;

void switch_thread();

bool can_run(const Thread& t) { return t.word == nullptr || (*t.word & t.mask) != t.value; }

// The current thread waits while (*word & mask) == value.
void wait_while(const uint32_t* word, uint32_t mask, uint32_t value, const char* what) {
    Thread& me = *current;
    while ((*word & mask) == value) {
        me.word = word, me.mask = mask, me.value = value, me.waits_for = what;
        switch_thread();
        me.word = nullptr;
    }
}

char* take_stack() {
    if (!free_stacks.empty()) {
        char* stack = free_stacks.back();
        free_stacks.pop_back();
        return stack;
    }
    void* memory =
        mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    return static_cast<char*>(memory);
}

// Returns to emu_run. The current fiber does not run again.
void leave_fibers() {
    void* nowhere;
    emu_switch(&nowhere, scheduler_stack);
    abort();
}

LastStore& last_store(const char* at) { return current->cta->stores[(at - current->cta->base) / 4]; }

// The last accesses to the 16 bytes that `at` lies in.
LastAccess& last_access(const char* at) { return current->cta->accesses[(at - current->cta->base) / 16]; }

// What is known to the current warp.
Known& known_to_warp() { return current->cta->known[current->index / 32]; }
// The current warp arrives at a barrier: what it knows is from now on known to those that wait there.
void publish_to(Known& to) {
    to.join(known_to_warp());
    ++known_to_warp().stored[current->index / 32];  // what it loads and stores from now on is not known there
}

// --- asynchronous copies ---

void finish(const Copy& copy) {
    if (copy.arrives) {
        mbarrier_arrive(copy.barrier);
    } else if (copy.valid) {
        memcpy(stored(copy.to, copy.bytes), copy.from, copy.bytes);
    } else {
        memset(stored(copy.to, copy.bytes), 0, copy.bytes);
    }
}

// Finishes one of the thread's copies that are under way, drawn by the seed. An arrival comes behind all copies before
// it.
void finish_one_copy_of(Thread& t) {
    size_t i = 0;
    if (!t.copies[0].arrives) {
        size_t n = 0;
        while (n < t.copies.size() && !t.copies[n].arrives) ++n;
        i = draw(n);
    }
    const Copy copy = t.copies[i];
    t.copies.erase(t.copies.begin() + i);
    finish(copy);
}

// Ends the phase of an mbarrier if no arrivals and no bytes are missing.
void end_phase(uint32_t* words) {
    if ((words[0] >> 1 & 0x7fff) != 0 || words[1] != (LIVE | NO_BYTES)) return;
    words[0] ^= 1;
    words[0] |= words[0] >> 16 << 1;
    run.idle = 0;
}

// The two words of an mbarrier.
uint32_t* words_of(uint32_t barrier) {
    if (barrier % 8) fail("a misaligned mbarrier");
    uint32_t* words = reinterpret_cast<uint32_t*>(shared(barrier));
    if ((words[1] & 0xff000000) != LIVE) fail("an mbarrier that is not initialised");
    return words;
}

// Finishes bulk copy number i of the CTA.
void finish_bulk(Cta& cta, size_t i) {
    const Copy copy = cta.bulk[i];
    cta.bulk.erase(cta.bulk.begin() + i);
    shared(copy.to + copy.bytes - 1);
    memcpy(shared(copy.to), copy.from, copy.bytes);
    for (int i = 0; i < copy.bytes; i += 4) last_store(shared(copy.to + i)) = {};
    uint32_t* words = words_of(copy.barrier);
    words[1] -= copy.bytes;
    end_phase(words);
}

// Finishes some of the copies that are under way. Returns false if there are none. finish() works for the thread
// `current`, so this is set to the owner of each copy for a while.
bool finish_some_copies() {
    Thread* me = current;
    std::vector<Thread*> owners;
    std::vector<Cta*> bulk;
    for (Cta* cta : run.ctas) {
        for (Thread* t : cta->threads)
            if (!t->copies.empty()) owners.push_back(t);
        if (!cta->bulk.empty()) bulk.push_back(cta);
    }
    const size_t n = owners.size() + bulk.size();
    if (n == 0) {
        run.copies = false;
        return false;
    }
    for (uint32_t times = 1 + draw(32); times > 0; --times) {
        const size_t i = draw(n);
        if (i < owners.size()) {
            current = owners[i];
            for (size_t left = draw(current->copies.size() + 1); current->copies.size() > left;)
                finish_one_copy_of(*current);
        } else {
            Cta* cta = bulk[i - owners.size()];
            current = cta->threads[0];
            if (!cta->bulk.empty()) finish_bulk(*cta, draw(cta->bulk.size()));
        }
    }
    current = me;
    return true;
}

// --- scheduler ---

// At the end of a CTA: finishes the copies that nothing waited for, and looks whether the kernel wrote behind its
// shared memory.
void finish_copies_of(const Cta& cta) {
    for (Thread* t : cta.threads) {
        current = t;
        while (!t->copies.empty()) finish_one_copy_of(*t);
    }
    while (!cta.bulk.empty()) finish_bulk(*current->cta, 0);
    const size_t words = (cta.beyond_end - cta.beyond) / 4;
    for (size_t i = 0; i < words; ++i)
        if (reinterpret_cast<const uint32_t*>(cta.beyond)[i] != cta.poison) fail("written behind the shared memory");
}

void end_turn(Barrier& b) {
    b.arrived = 0;
    b.was_any = b.any, b.was_all = b.all;
    b.any = false, b.all = true;
    ++b.turn;
    run.idle = 0;
}

// What a fiber runs: the kernel, then the end of its thread.
void begin_thread() {
    run.kernel->images[current->cta->image].body(run.params);
    Thread& me = *current;
    me.done = true;
    --me.cta->alive;
    Barrier& zero = me.cta->barriers[0];  // __syncthreads does not wait for threads that returned
    if (zero.arrived > 0 && zero.arrived == me.cta->alive) end_turn(zero);
    run.idle = 0;
    for (const Cta* cta : *me.cta->cluster)
        if (cta->alive > 0) switch_thread();  // does not return, as the thread is done
    for (const Cta* cta : *me.cta->cluster) finish_copies_of(*cta);
    leave_fibers();  // emu_run ends the cluster
}

// Draws another order of the warps.
void shuffle_warps() {
    const size_t warps = run.order.size() / 32;
    for (size_t i = warps; i > 1; --i) {
        const size_t j = draw(i);
        if (j != i - 1)
            std::swap_ranges(run.order.begin() + 32 * j, run.order.begin() + 32 * j + 32,
                             run.order.begin() + 32 * (i - 1));
    }
}

// Fills a CTA's shared memory with one of four words, drawn by the seed: a number of no meaning, NaN in float32, two
// NaN in bfloat16, or two ones in bfloat16.
void poison(Cta& cta) {
    const uint32_t word[] = {0xcdcdcdcd, 0xffffffff, 0x7fc07fc0, 0x3f803f80};
    cta.poison = word[draw(4)];
    memset(cta.start, 0xcd, 64);
    for (char* p = cta.base + (cta.start - cta.base + 3) / 4 * 4; p < cta.end; p += 4) memcpy(p, &cta.poison, 4);
}

// The number of a copy of the kernel's library that no CTA uses: a free one, or a new one.
int take_image() {
    if (!free_images.empty()) {
        const int i = free_images.back();
        free_images.pop_back();
        return i;
    }
    Kernel& kernel = *run.kernel;
    const std::string copy = kernel.path + "." + std::to_string(getpid()) + "." + std::to_string(kernel.images.size());
    FILE* from = fopen(kernel.path.c_str(), "rb");
    FILE* to = fopen(copy.c_str(), "wb");
    char buffer[1 << 16];
    for (size_t n; from && to && (n = fread(buffer, 1, sizeof(buffer), from)) > 0;) fwrite(buffer, 1, n, to);
    if (from) fclose(from);
    if (to) fclose(to);
    Image image;
    image.handle = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
    unlink(copy.c_str());
    if (!image.handle) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    image.body = reinterpret_cast<void (*)(const void*)>(dlsym(image.handle, "emu_body"));
    reinterpret_cast<void (*)(SharedMemory*)>(dlsym(image.handle, "emu_memory"))(&image.memory);
    kernel.threads = reinterpret_cast<int (*)()>(dlsym(image.handle, "emu_threads"))();
    kernel.shared_bytes = reinterpret_cast<int (*)()>(dlsym(image.handle, "emu_shared_bytes"))();
    kernel.images.push_back(image);
    return int(kernel.images.size()) - 1;
}

// Starts the next cluster of the grid.
void start_cluster() {
    const uint32_t number = run.started++;
    auto* cluster = new std::vector<Cta*>;
    auto* barrier = new Cta::ClusterBarrier{};
    for (uint32_t rank = 0; rank < run.cluster_size; ++rank) {
        const uint32_t i = number * run.cluster_size + rank;
        Cta* cta = new Cta{};
        cta->image = take_image();
        const SharedMemory& memory = run.kernel->images[cta->image].memory;
        cta->start = memory.begin;
        cta->end = memory.end;
        cta->base = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(cta->start) & ~uintptr_t(1023));
        cta->block = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        cta->rank = int(rank);
        cta->cluster = cluster;
        cta->cluster_barrier = barrier;
        cta->alive = threads_of_cta;
        for (Barrier& b : cta->barriers) b.all = true;
        cta->beyond = memory.array + (run.kernel->shared_bytes + 3) / 4 * 4;
        cta->beyond_end = memory.array_end;
        cta->stores.resize((cta->end - cta->base) / 4 + 4);
        cta->accesses.resize((cta->end - cta->base) / 16 + 4);
        for (int warp = 0; warp < MAX_WARPS; ++warp) cta->known[warp].stored[warp] = 1;
        poison(*cta);
        cluster->push_back(cta);
        run.ctas.push_back(cta);
        for (int t = 0; t < threads_of_cta; ++t) {
            Thread* thread = new Thread{};
            thread->index = t;
            thread->cta = cta;
            thread->wgmmas = new WgmmaQueue;
            thread->stack = take_stack();
            // Staggered, so that not all threads' stacks compete for the same cache lines.
            char* top = thread->stack + STACK_BYTES - 4096 - (t * 17 % 64) * 64;
            void** frame = reinterpret_cast<void**>(top) - FRAME;
            frame[RETURN_AT] = reinterpret_cast<void*>(&begin_thread);
            thread->stack_pointer = frame;
            cta->threads.push_back(thread);
            run.order.push_back(thread);
        }
    }
    shuffle_warps();
}

void end_cta(Cta* cta) {
    for (Thread* t : cta->threads) {
        free_stacks.push_back(t->stack);
        delete t->wgmmas;
        delete t;
    }
    for (auto& of_warp : cta->meetings)
        for (Meeting* m : of_warp) delete m;
    free_images.push_back(cta->image);
    if (cta->rank + 1 == int(cta->cluster->size())) {
        delete cta->cluster_barrier;
        delete cta->cluster;
    }
    delete cta;
}

// Ends the clusters whose threads have all returned, or with `all` every cluster.
void end_clusters(bool all = false) {
    std::vector<Cta*> left, ended;
    for (size_t i = 0; i < run.ctas.size(); i += run.cluster_size) {
        bool alive = false;
        for (uint32_t j = 0; j < run.cluster_size; ++j) alive |= run.ctas[i + j]->alive > 0;
        auto& to = alive && !all ? left : ended;
        to.insert(to.end(), run.ctas.begin() + i, run.ctas.begin() + i + run.cluster_size);
    }
    if (ended.empty()) return;
    run.ctas = left;
    run.order.clear();
    for (Cta* cta : left) run.order.insert(run.order.end(), cta->threads.begin(), cta->threads.end());
    shuffle_warps();
    run.at = 0;
    for (Cta* cta : ended) end_cta(cta);
}

// Which threads wait for what, for error messages.
std::string list_waiters() {
    std::string text;
    char line[200];
    for (Cta* cta : run.ctas) {
        const char* last = nullptr;
        for (Thread* t : cta->threads) {
            const char* what = t->done ? "returned" : t->polls ? "polls memory" : t->waits_for ? t->waits_for : "runs";
            const uint32_t word = t->word ? uint32_t(reinterpret_cast<const char*>(t->word) - cta->base) : 0;
            if (t->index % 32 != 0 && last == what) continue;
            last = what;
            snprintf(line, sizeof(line), "\n  CTA %u %u %u thread %d: %s", cta->block.x, cta->block.y, cta->block.z,
                     t->index, what);
            text += line;
            for (const Meeting* m : cta->meetings[t->index / 32])
                if (t->word == &m->turn) {
                    snprintf(line, sizeof(line), ", lanes %#x of %#x are there", m->arrived, m->lanes);
                    text += line;
                }
            if (!t->done && t->word && word < 0x40000) {
                snprintf(line, sizeof(line), " at %#x, state %#x %#x, turn %u", word, t->word[0], t->word[1],
                         t->value);
                text += line;
            }
            if (text.size() > 6000) return text + "\n  ...";
        }
    }
    return text;
}

// The next thread to run: the first in turn that does not wait and does not poll. Where there is none: some copies are
// finished. Where there are none: the first thread that polls. Where threads poll in vain or there are none: the next
// cluster starts. Returns null if nothing is left to do; run.error then says why.
Thread* next_thread() {
    if (run.copies && draw(256) == 0) finish_some_copies();
    if (draw(512) == 0) shuffle_warps();
    for (;;) {
        const size_t n = run.order.size();
        Thread* poller = nullptr;
        size_t of_poller = 0;
        for (size_t k = 0, i = run.at; k < n; ++k) {
            if (++i >= n) i = 0;
            Thread* t = run.order[i];
            if (t->done) continue;
            if (!can_run(*t)) continue;
            if (t->polls) {
                if (!poller) poller = t, of_poller = i;
                continue;
            }
            run.at = i;
            return t;
        }
        if (run.copies && finish_some_copies()) continue;
        const bool more = run.started < run.clusters && run.ctas.size() + run.cluster_size <= run.most_alive;
        if (poller && ++run.idle < (more ? 2000 : MAX_IDLE)) {
            run.at = of_poller;
            return poller;
        }
        run.idle = 0;
        if (!more) {
            run.error = (poller ? "no end of polling:" : "deadlock:") + list_waiters();
            return nullptr;
        }
        start_cluster();
    }
}

// Lets the next thread run. Returns when it is the current thread's turn again.
void switch_thread() {
    Thread* me = current;
    Thread* to = next_thread();
    if (to == me) return;
    current = to;
    emu_switch(&me->stack_pointer, to ? to->stack_pointer : scheduler_stack);
}

}  // namespace

void wait_for_change(const uint32_t* word, uint32_t value, const char* what) { wait_while(word, ~0u, value, what); }

uint32_t draw(uint32_t n) { return n < 2 ? 0 : numbers() % n; }

void yield() {
    current->polls = true;
    switch_thread();
    current->polls = false;
}

void fail(const char* message) {
    char line[200];
    snprintf(line, sizeof(line), "%s (CTA %u %u %u, thread %d)", message, current->cta->block.x, current->cta->block.y,
             current->cta->block.z, current->index);
    run.error = line;
    leave_fibers();
    abort();
}

// --- stores and wgmma ---------------------------------------------------------------------------------------------

// Notes that the current warp loads from these bytes, or stores to them.
static void access(const char* at, int bytes) {
    const int warp = current->index / 32;
    for (const char* p = at; p < at + bytes; p += 16) last_access(p).time[warp] = known_to_warp().stored[warp];
}

char* stored(uint32_t address, int bytes) {
    char* at = shared(address);
    const int warp = current->index / 32;
    access(at, bytes);
    for (int i = 0; i < bytes; i += 4) last_store(at + i) = {warp, known_to_warp().stored[warp]};
    return at;
}

char* loaded(uint32_t address, int bytes) {
    char* at = shared(address);
    if (address >> 24) return at;  // of another CTA: its warps have clocks that this one does not know
    access(at, bytes);
    for (int i = 0; i < bytes; i += 4) {
        const LastStore& last = last_store(at + i);
        const bool other = last.warp != current->index / 32;
        if (other && last.time > known_to_warp().stored[last.warp])
            fail("a load that no barrier orders after the store");
    }
    return at;
}

const char* loaded_by_wgmma(uint32_t address) {
    const char* at = shared(address);
    for (int i = 0; i < 16; i += 4) {
        const LastStore& last = last_store(at + i);
        if (last.time > known_to_warp().fenced[last.warp]) fail("wgmma reads what has not passed a fence.proxy.async");
    }
    return at;
}

void fence_proxy_async() {
    Known& known = known_to_warp();
    std::copy(known.stored, known.stored + MAX_WARPS, known.fenced);
    ++known.stored[current->index / 32];
}

void count_product() { ++run.products; }

// --- warps and barriers -------------------------------------------------------------------------------------------

const uint64_t* exchange(uint64_t mine, uint32_t mask) {
    Thread& me = *current;
    const int lane = me.index % 32;
    if (!(mask >> lane & 1)) fail("a lane that its mask leaves out");
    auto& meetings = me.cta->meetings[me.index / 32];
    Meeting* meeting = nullptr;
    for (Meeting* m : meetings)
        if (m->lanes == mask) {
            meeting = m;
            break;
        }
    if (!meeting) {
        meeting = new Meeting{mask, 0, 0, {}};
        meetings.push_back(meeting);
    }
    const uint32_t turn = meeting->turn;
    uint64_t* slots = meeting->numbers[turn & 1];
    slots[lane] = mine;
    meeting->arrived |= 1u << lane;
    if (meeting->arrived == mask) {
        meeting->arrived = 0;
        ++meeting->turn;
    } else {
        wait_while(&meeting->turn, ~0u, turn, "its warp");
    }
    return slots;
}

int threads_left() { return current->cta->alive; }

namespace {
Barrier& arrive(int id, int threads, bool value) {
    if (id < 0 || id > 15) fail("no such named barrier");
    if (id > 0 && threads % 32) fail("a named barrier of a count that is no multiple of 32");
    Barrier& b = current->cta->barriers[id];
    if (id > 0 && b.arrived > 0 && b.expected != threads) fail("a named barrier under two counts");
    b.expected = threads;
    b.any |= value;
    b.all &= value;
    publish_to(b.known);
    if (++b.arrived >= threads) end_turn(b);
    return b;
}
const char* const BARRIERS[] = {"__syncthreads", "barrier 1",  "barrier 2",  "barrier 3", "barrier 4",  "barrier 5",
                                "barrier 6",     "barrier 7",  "barrier 8",  "barrier 9", "barrier 10", "barrier 11",
                                "barrier 12",    "barrier 13", "barrier 14", "barrier 15"};
}  // namespace

void barrier_arrive(int id, int threads) { arrive(id, threads, false); }

Barrier& barrier_sync(int id, int threads, bool value) {
    const uint32_t turn = current->cta->barriers[id & 15].turn;
    Barrier& b = arrive(id, threads, value);
    wait_while(&b.turn, ~0u, turn, BARRIERS[id]);
    known_to_warp().join(b.known);
    return b;
}

void cluster_arrive() {
    Cta::ClusterBarrier& b = *current->cta->cluster_barrier;
    current->cluster_turn = b.turn;
    publish_to(current->cta->at_cluster_barrier);
    if (++b.arrived == threads_of_cta * int(current->cta->cluster->size())) b.arrived = 0, ++b.turn;
}
void cluster_wait() {
    wait_while(&current->cta->cluster_barrier->turn, ~0u, current->cluster_turn, "its cluster");
    known_to_warp().join(current->cta->at_cluster_barrier);
}

// --- mbarriers ----------------------------------------------------------------------------------------------------

// An mbarrier's two words:
//   0   bit 0: the phase's parity; bits 1 .. 15: arrivals that are missing; bits 16 .. 31: arrivals that a phase needs
//   1   LIVE, plus NO_BYTES, plus the bytes that are missing (or minus, where they came before they were expected)
void mbarrier_init(uint32_t barrier, int arrivals) {
    if (barrier % 8 || arrivals < 1 || arrivals > 0x7fff) fail("mbarrier.init: address or count");
    uint32_t* words = reinterpret_cast<uint32_t*>(shared(barrier));
    words[0] = uint32_t(arrivals) << 16 | uint32_t(arrivals) << 1;
    words[1] = LIVE | NO_BYTES;
}

void mbarrier_arrive(uint32_t barrier, int expected_bytes) {
    uint32_t* words = words_of(barrier);
    if ((words[0] >> 1 & 0x7fff) == 0) fail("more arrivals at an mbarrier than its count");
    words[1] += expected_bytes;
    words[0] -= 2;
    publish_to(current->cta->at_mbarrier[barrier]);
    end_phase(words);
}

bool mbarrier_done(uint32_t barrier, uint32_t parity) {
    yield();
    const bool done = (*words_of(barrier) & 1) != (parity & 1);
    if (done) known_to_warp().join(current->cta->at_mbarrier[barrier]);
    return done;
}

void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    if (parity > 1) fail("an mbarrier's parity is 0 or 1");
    wait_while(words_of(barrier), 1, parity, "an mbarrier");
    known_to_warp().join(current->cta->at_mbarrier[barrier]);
}

// --- asynchronous copies ------------------------------------------------------------------------------------------

void copy_async(uint32_t to, const void* from, int bytes, bool valid) {
    if (to % bytes || (valid && reinterpret_cast<uintptr_t>(from) % bytes)) fail("a misaligned cp.async");
    const Copy copy = {to, from, bytes, valid, false, 0, current->groups};
    shared(to);
    if (draw(4) == 0) return finish(copy);
    current->copies.push_back(copy);
    run.copies = true;
}

void copy_commit() { ++current->groups; }

void copy_wait(int newest_groups) {
    auto& copies = current->copies;
    const auto due = [&](const Copy& c) { return !c.arrives && c.group < current->groups - newest_groups; };
    for (size_t i = 0; i < copies.size();) {
        if (due(copies[i])) {
            finish(copies[i]);
            copies.erase(copies.begin() + i);
        } else {
            ++i;
        }
    }
}

void copy_wait_all() {
    while (!current->copies.empty()) finish_one_copy_of(*current);
}

void arrive_after_copies(uint32_t barrier) {
    words_of(barrier);
    Copy arrival = {};
    arrival.arrives = true;
    arrival.barrier = barrier;
    if (current->copies.empty() && draw(4) == 0) return finish(arrival);
    current->copies.push_back(arrival);
    run.copies = true;
}

void copy_in_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    if (to % 16 || bytes % 16 || bytes < 0 || reinterpret_cast<uintptr_t>(from) % 16)
        fail("a misaligned cp.async.bulk");
    words_of(barrier);
    Cta& cta = *current->cta;
    for (int i = 0; i < bytes; i += 16) {
        LastAccess& last = last_access(shared(to + i));
        for (int warp = 0; warp < MAX_WARPS; ++warp)
            if (last.time[warp] > known_to_warp().fenced[warp])
                fail("a bulk copy to what was read or written, without a fence.proxy.async in between");
        last = {};
    }
    cta.bulk.push_back({to, from, bytes, true, false, barrier, 0});
    if (draw(4) == 0) return finish_bulk(cta, cta.bulk.size() - 1);
    run.copies = true;
}

}  // namespace emu

// --- for Python ---------------------------------------------------------------------------------------------------

using namespace emu;

// Loads a kernel's library, and reads its numbers of threads and of bytes of shared memory from it.
extern "C" void* emu_load(const char* path, int* threads, int* shared_bytes) {
    auto* kernel = new emu::Kernel;
    kernel->path = path;
    run.kernel = kernel;
    free_images.clear();
    take_image();
    *threads = kernel->threads;
    *shared_bytes = kernel->shared_bytes;
    return kernel;
}

// A kernel that accesses memory that is not there ends its run, not the process.
static void on_fault(int, siginfo_t* info, void*) {
    static char message[64];
    snprintf(message, sizeof(message), "a fault at address %p", info->si_addr);
    fail(message);
}

// Handles faults by on_fault while this object lives.
struct Faults {
    struct sigaction before[2];
    Faults() {
        static char stack[1 << 16];
        stack_t other = {};
        other.ss_sp = stack, other.ss_size = sizeof(stack);
        sigaltstack(&other, nullptr);
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &before[0]);
        sigaction(SIGBUS, &action, &before[1]);
    }
    ~Faults() {
        sigaction(SIGSEGV, &before[0], nullptr);
        sigaction(SIGBUS, &before[1], nullptr);
    }
};

// Launches a kernel and waits for it. Returns null, or what went wrong. At most `most_alive` CTAs run at a time.
extern "C" const char* emu_run(void* handle, const uint32_t* dims, uint32_t cluster, const void* params,
                               int most_alive, uint32_t seed) {
    auto* kernel = static_cast<emu::Kernel*>(handle);
    grid = {dims[0], dims[1], dims[2]};
    threads_of_cta = kernel->threads;
    numbers.seed(seed);
    run = Run{kernel, params, grid.x * grid.y * grid.z / cluster, cluster, 0, size_t(most_alive), {}, {}, 0, 0, false,
              {},     0};
    free_images.clear();
    for (size_t i = kernel->images.size(); i-- > 0;) free_images.push_back(int(i));
    if (grid.x % cluster) return "a grid that is no multiple of its clusters";
    if (threads_of_cta % 32) return "a CTA that is no multiple of 32 threads";
    Faults faults;
    while (run.error.empty()) {
        if (run.ctas.empty()) {
            if (run.started == run.clusters) break;
            start_cluster();
            run.at = run.order.size() - 1;
        }
        current = next_thread();
        if (!current) break;
        emu_switch(&scheduler_stack, current->stack_pointer);
        if (run.error.empty()) end_clusters();
    }
    end_clusters(true);
    static std::string error;
    error = run.error;
    return error.empty() ? nullptr : error.c_str();
}

// How many instructions of the last launch multiplied matrices, over all its warps.
extern "C" uint64_t emu_products() { return emu::run.products / 32; }
