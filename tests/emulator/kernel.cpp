// A kernel as a shared library for the machine: -DKERNEL=<its name> -DKERNEL_FILE="<its text>" (emulator.py).
#include "cuda.h"

// The array that a file declares as `extern __shared__`, under either name; with all that a CTA may have.
asm(".pushsection .bss\n"
    ".balign 1024\n"
    "shared:\n"
    "shared_bytes:\n"
    ".zero 232448\n"
    "shared_end:\n"
    ".popsection\n");

#include KERNEL_FILE

namespace {
template <class Params>
void call(void (*kernel)(Params), const void* params) {
    kernel(*static_cast<const Params*>(params));
}
}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void emu_body(const void* params) { call(KERNEL, params); }
EXPORT int emu_threads() { return kernel_threads; }
EXPORT int emu_shared_bytes() { return kernel_shared_bytes; }

extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[], shared_end[];
EXPORT void emu_memory(char** where) {
    where[0] = __bss_start;
    where[1] = _end;
    where[2] = shared_end;
}
