// A kernel as a shared library. emulator.py passes -DKERNEL=<name> -DKERNEL_FILE="<file with its text>".
#include "cuda.h"

// The array that kernels declare as `extern __shared__`, under both names that they use. It has 227 KB, the most that
// a CTA may have.
asm(".pushsection .bss\n"
    ".balign 1024\n"
    "shared_begin:\n"
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

extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[], shared_begin[], shared_end[];
EXPORT void emu_memory(emu::SharedMemory* memory) { *memory = {__bss_start, _end, shared_begin, shared_end}; }
