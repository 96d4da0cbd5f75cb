"""Four kernels without a race, to see what compute-sanitizer's racecheck makes of their way to synchronise.

compute-sanitizer --tool racecheck python benchmarks/racecheck_control.py

`named`: 256 of 384 threads write, meet at a named barrier, and read. `rounds`: over and over, as results leave the FP8
decode kernel. `ring`: a warpgroup copies into a ring of two slots by cp.async, two others read; full and empty
mbarriers stand between, as in the Hopper kernels. `lanes`: the same ring, but one lane arrives for its warp, behind
__syncwarp. All check what was read. If racecheck reports one of them, what it reports of kernels that do the same says
nothing.
"""

from __future__ import annotations

import cupy

ROUNDS, SLOT = 6, 512

SOURCE = r"""
__device__ __forceinline__ unsigned address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void set_up(unsigned long long& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(unsigned long long& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}
__device__ __forceinline__ void wait(unsigned long long& barrier, unsigned parity) {
    unsigned done = 0;
    while (!done)
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(address(&barrier)), "r"(parity)
            : "memory");
}

extern "C" __global__ void __launch_bounds__(384, 1) named(const float* in, float* out) {
    __shared__ float s[256];
    if (threadIdx.x >= 256) return;
    s[threadIdx.x] = in[threadIdx.x];
    asm volatile("bar.sync 5, 256;" ::: "memory");
    out[threadIdx.x] = s[255 - threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(384, 1) rounds(const float* in, float* out) {
    __shared__ float s[256];
    if (threadIdx.x >= 256) return;
    for (int i = 0; i < ROUNDS; ++i) {
        s[threadIdx.x] = in[i * 256 + threadIdx.x];
        asm volatile("bar.sync 5, 256;" ::: "memory");
        out[i * 256 + threadIdx.x] = s[255 - threadIdx.x];
        asm volatile("bar.sync 5, 256;" ::: "memory");
    }
}

template <bool LANES>
__device__ __forceinline__ void run_ring(const float* in, float* out) {
    __shared__ __align__(16) float s[2][SLOT];
    __shared__ unsigned long long full[2], empty[2];
    if (threadIdx.x < 2) {
        set_up(full[threadIdx.x], 128);
        set_up(empty[threadIdx.x], LANES ? 8 : 256);
    }
    __syncthreads();
    for (int i = 0; i < ROUNDS; ++i) {
        const int slot = i % 2;
        const unsigned parity = i / 2 % 2;
        if (threadIdx.x >= 256) {
            const int at = 4 * (threadIdx.x - 256);
            const unsigned to = address(s[slot] + at);
            wait(empty[slot], parity ^ 1);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in + i * SLOT + at) : "memory");
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(&full[slot])) : "memory");
        } else {
            wait(full[slot], parity);
            const float x = s[slot][255 - threadIdx.x], y = s[slot][511 - threadIdx.x];
            if (LANES) __syncwarp();
            if (!LANES || threadIdx.x % 32 == 0) arrive(empty[slot]);
            out[i * 256 + threadIdx.x] = x + y;
        }
    }
}
extern "C" __global__ void __launch_bounds__(384, 1) ring(const float* in, float* out) { run_ring<false>(in, out); }
extern "C" __global__ void __launch_bounds__(384, 1) lanes(const float* in, float* out) { run_ring<true>(in, out); }
"""


def main() -> None:
    options = ("-std=c++17", "-arch=sm_90a", f"-DROUNDS={ROUNDS}", f"-DSLOT={SLOT}")
    module = cupy.RawModule(code=SOURCE, options=options)
    given = cupy.random.default_rng().random(ROUNDS * SLOT, cupy.float32)
    slots = given.reshape(ROUNDS, 2, 256)
    sums = (slots[:, 0, ::-1] + slots[:, 1, ::-1]).ravel()
    turned = given[: ROUNDS * 256].reshape(ROUNDS, 256)[:, ::-1].ravel()
    wanted = {"named": given[:256][::-1], "rounds": turned, "ring": sums, "lanes": sums}
    for name, want in wanted.items():
        got = cupy.empty_like(want)
        module.get_function(name)((1,), (384,), (given, got))
        assert (got == want).all(), name
        print(name, "is right", flush=True)


if __name__ == "__main__":
    main()
