"""Kernels to see what compute-sanitizer's racecheck makes of their way to synchronise.

compute-sanitizer --tool racecheck python benchmarks/racecheck_control.py [names; without, all]

Without a race, and what was read is checked:
  named           256 of 384 threads write, meet at a named barrier, and read
  rounds          over and over, as results leave the FP8 decode kernel
  ring            a warpgroup copies into a ring of two slots by cp.async, two others read; full and empty mbarriers
                  stand between, as in the Hopper kernels
  lanes           the same ring, but one lane arrives for its warp, behind __syncwarp
  chain           a warpgroup writes, another reads, and the first writes again after a release that comes by way of
                  a third: bar.arrive and bar.sync, an mbarrier, cp.async, an mbarrier
  stmatrix, ldmatrix, wgmma
                  write or read what another warpgroup reads or has written
  bulk            a bulk copy
  bulk_ring       the ring, filled by bulk copies and read by ldmatrix; who has read passes a fence.proxy.async
  bulk_ring_late  the same, but the thread that copies passes it, after it has waited for the readers
  cluster         a CTA reads another's shared memory
With one, which racecheck should report: planted_ring (copies start before their slot is empty), planted_bulk_ring
(without a fence), and planted_stmatrix, planted_ldmatrix, planted_wgmma, planted_bulk and planted_cluster (reads wait
for nothing).
"""

from __future__ import annotations

import sys

import cupy
import numpy as np

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

template <bool LANES, bool WAITS>
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
            if (WAITS) wait(empty[slot], parity ^ 1);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in + i * SLOT + at) : "memory");
            if (!WAITS) wait(empty[slot], parity ^ 1);
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

__device__ __forceinline__ void run_chain(const float* in, float* out) {
    __shared__ float copied[128], handed[128];
    __shared__ unsigned long long full, empty;
    if (threadIdx.x == 0) {
        set_up(full, 128);
        set_up(empty, 256);
    }
    __syncthreads();
    const int thread = threadIdx.x % 128;
    for (int i = 0; i < ROUNDS; ++i) {
        if (threadIdx.x >= 256) {
            wait(empty, i % 2 ^ 1);
            const unsigned to = address(copied + thread);
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(in + i * 128 + thread) : "memory");
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(&full)) : "memory");
        } else if (threadIdx.x >= 128) {
            asm volatile("bar.sync 1, 256;" ::: "memory");
            out[i * 128 + thread] = handed[thread ^ 32];
            arrive(empty);
        } else {
            wait(full, i % 2);
            handed[thread] = copied[127 - thread];
            asm volatile("bar.arrive 1, 256;" ::: "memory");
            arrive(empty);
        }
    }
}

// Eight rows of eight 16-bit values go through shared memory, by stmatrix or ldmatrix on one of the sides.
template <bool STMATRIX, bool WAITS>
__device__ __forceinline__ void run_matrix(const float* in, float* out) {
    __shared__ __align__(16) unsigned s[4][32];
    if (threadIdx.x >= 256) return;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const unsigned row = address(s[warp] + lane % 8 * 4);
    if (threadIdx.x >= 128) {
        const unsigned x = __float_as_uint(in[threadIdx.x - 128]);
        if (STMATRIX) {
            asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row), "r"(x) : "memory");
        } else {
            s[warp][lane] = x;
        }
    }
    if (WAITS) asm volatile("bar.sync 5, 256;" ::: "memory");
    if (threadIdx.x >= 128) return;
    unsigned x;
    if (STMATRIX) {
        x = s[warp][lane];
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x) : "r"(row) : "memory");
    }
    out[threadIdx.x] = __uint_as_float(x);
}

// 64 x 8 = A . B^T over 16 of k, of ones.
template <bool WAITS>
__device__ __forceinline__ void run_wgmma(float* out) {
    __shared__ __align__(128) unsigned a[512], b[64];
    if (threadIdx.x >= 256) return;
    if (threadIdx.x >= 128) {
        for (int i = threadIdx.x - 128; i < 512; i += 128) a[i] = 0x3f803f80;
        if (threadIdx.x < 192) b[threadIdx.x - 128] = 0x3f803f80;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    if (WAITS) asm volatile("bar.sync 5, 256;" ::: "memory");
    if (threadIdx.x >= 128) return;
    auto operand = [](const void* p) { return (unsigned long long)(address(p)) >> 4 | 8ull << 16 | 16ull << 32; };
    float c[4];
    asm volatile(
        "wgmma.fence.sync.aligned;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 0, 1, 1, 0, 0;\n"
        "wgmma.commit_group.sync.aligned;\n"
        "wgmma.wait_group.sync.aligned 0;\n"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "l"(operand(a)), "l"(operand(b))
        : "memory");
    for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = c[i];
}

template <bool WAITS>
__device__ __forceinline__ void run_bulk(const float* in, float* out) {
    __shared__ __align__(128) float s[384];
    __shared__ unsigned long long full;
    if (threadIdx.x == 0) {
        set_up(full, 1);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1536;" ::"r"(address(&full)) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1536, [%2];"
                     ::"r"(address(s)), "l"(in), "r"(address(&full)) : "memory");
    }
    if (WAITS) wait(full, 0);
    out[threadIdx.x] = s[383 - threadIdx.x];
    if (!WAITS) wait(full, 0);  // a block must outlive its copies
}

__device__ __forceinline__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// One thread fills the slots by bulk copies. A warp reads 64 words of each slot, two a thread.
enum Fence { NONE, READERS, WRITER };
template <Fence FENCE>
__device__ __forceinline__ void run_bulk_ring(const float* in, float* out) {
    __shared__ __align__(128) float s[2][SLOT];
    __shared__ unsigned long long full[2], empty[2];
    if (threadIdx.x < 2) {
        set_up(full[threadIdx.x], 1);
        set_up(empty[threadIdx.x], 256);
        fence();
    }
    __syncthreads();
    for (int i = 0; i < ROUNDS; ++i) {
        const int slot = i % 2;
        const unsigned parity = i / 2 % 2;
        if (threadIdx.x == 256) {
            wait(empty[slot], parity ^ 1);
            if (FENCE == WRITER) fence();
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&full[slot])),
                         "r"(4 * SLOT) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(address(s[slot])), "l"(in + i * SLOT), "r"(4 * SLOT), "r"(address(&full[slot]))
                         : "memory");
        } else if (threadIdx.x < 256) {
            wait(full[slot], parity);
            unsigned x, y;
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                         : "=r"(x), "=r"(y) : "r"(address(s[slot] + threadIdx.x / 32 * 64 + threadIdx.x % 16 * 4))
                         : "memory");
            if (FENCE == READERS) fence();
            arrive(empty[slot]);
            out[i * 256 + threadIdx.x] = __uint_as_float(x) + __uint_as_float(y);
        }
    }
}

__device__ __forceinline__ void meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <bool WAITS>
__device__ __forceinline__ void run_cluster(const float* in, float* out) {
    __shared__ float s[384];
    if (!WAITS) meet();  // a block must be there
    s[threadIdx.x] = in[384 * blockIdx.x + threadIdx.x];
    if (WAITS) meet();
    const unsigned here = address(s + 383 - threadIdx.x);
    unsigned there;
    float x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(1 - blockIdx.x));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(there) : "memory");
    out[384 * blockIdx.x + threadIdx.x] = x;
    meet();
}

#define KERNEL(name, run) \
    extern "C" __global__ void __launch_bounds__(384, 1) name(const float* in, float* out) { run; }
KERNEL(ring, (run_ring<false, true>(in, out)))
KERNEL(lanes, (run_ring<true, true>(in, out)))
KERNEL(planted_ring, (run_ring<false, false>(in, out)))
KERNEL(chain, run_chain(in, out))
KERNEL(stmatrix, (run_matrix<true, true>(in, out)))
KERNEL(planted_stmatrix, (run_matrix<true, false>(in, out)))
KERNEL(ldmatrix, (run_matrix<false, true>(in, out)))
KERNEL(planted_ldmatrix, (run_matrix<false, false>(in, out)))
KERNEL(wgmma, run_wgmma<true>(out))
KERNEL(planted_wgmma, run_wgmma<false>(out))
KERNEL(bulk, run_bulk<true>(in, out))
KERNEL(planted_bulk, run_bulk<false>(in, out))
KERNEL(bulk_ring, run_bulk_ring<READERS>(in, out))
KERNEL(bulk_ring_late, run_bulk_ring<WRITER>(in, out))
KERNEL(planted_bulk_ring, run_bulk_ring<NONE>(in, out))
KERNEL(__cluster_dims__(2, 1, 1) cluster, run_cluster<true>(in, out))
KERNEL(__cluster_dims__(2, 1, 1) planted_cluster, run_cluster<false>(in, out))
"""


def main() -> None:
    options = ("-std=c++17", "-arch=sm_90a", "-lineinfo", f"-DROUNDS={ROUNDS}", f"-DSLOT={SLOT}")
    module = cupy.RawModule(code=SOURCE, options=options)
    given = cupy.random.default_rng().random(ROUNDS * SLOT, cupy.float32)
    slots = given.reshape(ROUNDS, 2, 256)
    sums = (slots[:, 0, ::-1] + slots[:, 1, ::-1]).ravel()
    turned = given[: ROUNDS * 256].reshape(ROUNDS, 256)[:, ::-1].ravel()
    chained = given[: ROUNDS * 128].reshape(ROUNDS, 128)[:, (127 - np.arange(128)) ^ 32].ravel()
    others = given[:768].reshape(2, 384)[::-1, ::-1].ravel()
    wanted = {"named": given[:256][::-1], "rounds": turned, "ring": sums, "lanes": sums, "chain": chained}
    wanted |= {"stmatrix": given[:128], "ldmatrix": given[:128]}
    pairs = given.reshape(ROUNDS * 8, 2, 32).sum(1).ravel()
    wanted |= {"bulk_ring": pairs, "bulk_ring_late": pairs}
    wanted |= {"wgmma": cupy.full(512, 16, cupy.float32), "bulk": given[:384][::-1], "cluster": others}
    planted = ("ring", "stmatrix", "ldmatrix", "wgmma", "bulk", "bulk_ring", "cluster")
    wanted |= {f"planted_{name}": wanted[name] for name in planted}
    for name in sys.argv[1:] or wanted:
        want = wanted[name]
        got = cupy.empty_like(want)
        module.get_function(name)((2 if "cluster" in name else 1,), (384,), (given, got))
        right = bool((got == want).all())
        assert right or "planted" in name, name
        print(name, "is right" if right else "is wrong", flush=True)


if __name__ == "__main__":
    main()
