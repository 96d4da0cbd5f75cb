"""The emulated machine itself: kernels that are right are right under every seed, and those with an error are not."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from . import emulator
from .emulator import EmulatedGPU, Library, compiled, needs_compiler

pytestmark = needs_compiler

KERNEL = """
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

struct Params {
    const int* in;
    int* out;
};

extern __shared__ __align__(128) uint8_t shared[];
__shared__ int numbers[256];
__shared__ __align__(8) uint64_t barrier;

extern "C" __global__ void __launch_bounds__(THREADS) tested(const __grid_constant__ Params p) {
    const int thread = threadIdx.x, lane = thread % 32;
    BODY
}

extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 4096;
"""
SEEDS = range(12)


@pytest.fixture
def results(tmp_path: Path):
    """What a kernel of this body writes, under each of the seeds."""

    def run(body: str, threads: int = 128, ctas: int = 1, cluster: int = 1) -> list[list[int]]:
        (tmp_path / "tested.cu").write_text(KERNEL.replace("BODY", body))
        library = Library(compiled("tested.cu", "tested", {"THREADS": threads}, 90, (tmp_path,)), "tested")
        numbers, found = np.arange(1000, 1000 + threads, dtype=np.int32), []
        for seed in SEEDS:
            out = np.full(threads * ctas, -1, np.int32)
            params = struct.pack("QQ", numbers.ctypes.data, out.ctypes.data)
            library.run((ctas, 1, 1), cluster, params, 2, seed)
            found.append(out.tolist())
        return found

    return run


def all_right(found: list[list[int]], want: list[int]) -> bool:
    return all(out == want for out in found)


@pytest.mark.parametrize("sync", ["__syncthreads();", ""])
def test_threads_meet(results, sync):
    found = results(f"numbers[thread] = thread; {sync} p.out[thread] = numbers[(thread + 40) % THREADS];")
    assert all_right(found, [(t + 40) % 128 for t in range(128)]) == bool(sync)


@pytest.mark.parametrize("sync", ["__syncthreads();", ""])
def test_memory_is_read_before_it_is_written_again(results, sync):
    found = results(
        "numbers[thread] = thread; __syncthreads(); const int x = numbers[THREADS - 1 - thread];"
        f"{sync} numbers[thread] = -thread; __syncthreads(); p.out[thread] = x;"
    )
    assert all_right(found, list(range(127, -1, -1))) == bool(sync)


def test_threads_that_returned_are_not_waited_for(results):
    """Nor do they leave anything behind at the barrier: the second one has none that passes true."""
    found = results(
        "if (thread < 64) return; const int first = __syncthreads_or(thread == 70);"
        "p.out[thread] = 2 * first + __syncthreads_or(0);"
    )
    assert all_right(found, [-1] * 64 + [2] * 64)


COPIES = """
    cp_async_4(shared_address(shared) + 4 * thread, p.in + thread, thread != 3);
    cp_async_commit();
    WAIT
    p.out[thread] = load_shared_4(shared_address(shared) + 4 * (thread ^ 64));
"""
UNORDERED = "a load that no barrier orders after the store"


def test_copies_are_waited_for(results):
    found = results(COPIES.replace("WAIT", "cp_async_wait<0>(); __syncthreads();"))
    assert all_right(found, [1000 + (t ^ 64) if t ^ 64 != 3 else 0 for t in range(128)])


BULK = """
    const uint32_t at = shared_address(&barrier);
    if (thread == 0) mbarrier_init(at, ARRIVALS);
    __syncthreads();
    if (thread == 0) {
        mbarrier_arrive_expecting(at, 512);
        copy_in_bulk(shared_address(shared), p.in, 512, at);
    }
    __syncthreads();
    WAIT
    p.out[thread] = load_shared_4(shared_address(shared) + 4 * thread);
"""


@pytest.mark.parametrize(("wait", "right"), [("mbarrier_wait(at, 0);", True), ("", False)])
def test_bulk_copies_are_waited_for(results, wait, right):
    found = results(BULK.replace("ARRIVALS", "1").replace("WAIT", wait))
    assert all_right(found, list(range(1000, 1128))) == right


def test_an_arrival_comes_after_the_copies_before_it(results):
    found = results(
        "const uint32_t at = shared_address(&barrier); if (thread == 0) mbarrier_init(at, 96); __syncthreads();"
        "if (thread >= 32) { cp_async_4(shared_address(shared) + 4 * thread, p.in + thread, true);"
        "mbarrier_arrive_after_copies(at); }"
        "mbarrier_wait(at, 0); p.out[thread] = thread < 32 ? 0 : load_shared_4(shared_address(shared) + 4 * thread);"
    )
    assert all_right(found, [0] * 32 + list(range(1032, 1128)))


@pytest.mark.parametrize("sync", [True, False])
def test_clusters_read_each_other(results, sync):
    meet = "cluster_sync();" if sync else "__syncthreads();"
    body = (
        f"numbers[thread] = 100 * blockIdx.x + thread; {meet}"
        "const uint32_t there = cluster_address(shared_address(&numbers[thread ^ 32]), cluster_rank() ^ 1);"
        "p.out[128 * blockIdx.x + thread] = load_cluster_4(there); cluster_sync();"
    )
    found = results(body, ctas=4, cluster=2)
    assert all_right(found, [100 * (c ^ 1) + (t ^ 32) for c in range(4) for t in range(128)]) == sync


def test_a_cta_may_wait_for_a_later_one(results):
    body = (
        "if (blockIdx.x == 1) p.out[128 + thread] = 5; __syncthreads();"
        "if (blockIdx.x == 0) { while (atomicAdd(&p.out[128 + thread], 0) != 5) __nanosleep(20); p.out[thread] = 6; }"
    )
    assert all_right(results(body, ctas=2), [6] * 128 + [5] * 128)


PRODUCT = """
    const uint32_t ones = shared_address(shared);
    BEFORE
    for (int i = thread; i < 512; i += THREADS) store_shared_4(ones + 4 * i, 0x3f803f80);
    AFTER
    __syncthreads();
    THERE
    const uint64_t operand = wgmma_plain_operand(ones, 128, 1024);
    float c[4];
    wgmma_fence();
    wgmma<Values::BF16, Sum::SET, Major::K, Major::K>(c, operand, operand);
    wgmma_commit();
    wgmma_wait<0>();
    p.out[thread] = int(c[0]);
"""


@pytest.mark.parametrize("fence", ["BEFORE", "AFTER", "THERE"])
def test_stores_pass_a_fence_before_wgmma_reads_them(results, fence):
    body = PRODUCT
    for place in ("BEFORE", "AFTER", "THERE"):
        body = body.replace(place, "fence_proxy_async();" if place == fence else "")
    if fence == "BEFORE":
        with pytest.raises(RuntimeError, match="wgmma reads what has not passed a fence"):
            results(body)
    else:
        assert all_right(results(body), [16] * 128)


REFILLED = """
    const uint32_t at = shared_address(&barrier);
    if (thread == 0) mbarrier_init(at, 1);
    __syncthreads();
    for (int turn = 0; turn < 2; ++turn) {
        if (thread == 0) {
            THERE
            mbarrier_arrive_expecting(at, 512);
            copy_in_bulk(shared_address(shared), p.in, 512, at);
        }
        mbarrier_wait(at, turn & 1);
        p.out[thread] = load_shared_4(shared_address(shared) + 4 * (thread ^ 64));
        BEFORE
        __syncthreads();
    }
"""


@pytest.mark.parametrize("fence", ["BEFORE", "THERE", "NOWHERE"])
def test_loads_pass_a_fence_before_bulk_copies_come_again(results, fence):
    body = REFILLED
    for place in ("BEFORE", "THERE"):
        body = body.replace(place, "fence_proxy_async();" if place == fence else "")
    if fence == "NOWHERE":
        with pytest.raises(RuntimeError, match="a bulk copy to what was read or written"):
            results(body)
    else:
        assert all_right(results(body), [1000 + (t ^ 64) for t in range(128)])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (thread < 64) named_barrier_sync(3, 96);", r"deadlock:\n  CTA 0 0 0 thread 0: barrier 3"),
        (BULK.replace("ARRIVALS", "2").replace("WAIT", "mbarrier_wait(at, 0);"), "deadlock:\n.*an mbarrier at"),
        ("if (lane > 3) __syncwarp();", "deadlock:\n.*its warp, lanes 0xfffffff0 of 0xffffffff are there"),
        ("named_barrier_sync(3, thread < 64 ? 96 : 128);", "a named barrier under two counts"),
        ("mbarrier_arrive(shared_address(&barrier));", "an mbarrier that is not initialised"),
        (BULK.replace("ARRIVALS", "1").replace("WAIT", "mbarrier_arrive(at);"), "more arrivals at an mbarrier"),
        ("store_shared_4(2, thread);", "an address outside of shared memory|a misaligned address"),
        ("store_shared_4(shared_address(shared) + 1 << 20, 1);", "an address outside of shared memory"),
        ("shared[4096 + thread] = 1;", "written behind the shared memory"),
        ("cp_async_16(shared_address(shared) + 4 * thread, p.in, true);", "a misaligned cp.async"),
        (COPIES.replace("WAIT", "cp_async_wait<1>(); __syncthreads();"), UNORDERED),
        (COPIES.replace("WAIT", "cp_async_wait<0>();"), UNORDERED),
        ("__shfl_sync(0xffff, thread, 3);", "a lane that its mask leaves out"),
    ],
)
def test_errors_end_the_run(results, body, message):
    with pytest.raises(RuntimeError, match=r"(?s)^tested, grid .*" + message):
        results(body)


@pytest.mark.parametrize(
    ("version", "lacks"),
    [(None, "and there is none"), ("8.3.0", r".*/g\+\+ is 8\.3\.0"), ("none of it", r".*/g\+\+ is none of it")],
)
def test_a_machine_without_a_compiler(monkeypatch, tmp_path, version, lacks):
    """A message says what is missing, before anything is compiled."""
    script = tmp_path / "g++"
    script.write_text(f"#!/bin/sh\necho {version}\n")
    script.chmod(0o755)
    monkeypatch.setattr(emulator, "COMPILER", str(script) if version else "")
    with pytest.raises(RuntimeError, match=rf"^the emulator needs g\+\+ 9 or later, {lacks}$"):
        EmulatedGPU(monkeypatch)


def test_a_kernel_that_does_not_compile(results):
    with pytest.raises(RuntimeError, match=r"(?s)^tested does not compile with .*g\+\+:.*tested\.cu:.*no_such_thing"):
        results("no_such_thing();")
