"""Scratch memory that calls leave to the next ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla.bridges import LIBRARIES
from cupy_mla.calls import prepared
from cupy_mla.calls.operation import forget_calls
from cupy_mla.calls.scratch import BLOCK_BYTES, MAX_BLOCKS, PER_THREAD_STREAM, ScratchMemory, scratch_memory
from cupy_mla.cuda import driver
from tests import oracle
from tests.cases import prefill_inputs
from tests.kinds import TorchCUDA

torch = pytest.importorskip("torch")


@pytest.fixture
def memory(gpu) -> ScratchMemory:
    return ScratchMemory(LIBRARIES["torch"])


def give(block: Any) -> None:
    block[1].append(block)


def test_calls_in_turn_share_a_block(memory):
    first = memory.take(1000, 5, False)
    give(first)
    for nbytes in (1, BLOCK_BYTES):
        assert memory.take(nbytes, 5, False) is first
        give(first)


def test_no_other_call_has_it_meanwhile(memory):
    """Another thread's, or one within a call, as a signal handler's."""
    first, within = memory.take(1000, 5, False), memory.take(1000, 5, False)
    assert abs(first[0] - within[0]) >= BLOCK_BYTES
    give(within)
    give(first)
    assert {memory.take(1000, 5, False)[0] for _ in range(2)} == {first[0], within[0]}


@pytest.mark.parametrize(
    ("nbytes", "stream", "capturing"),
    [(1000, 5, True), (BLOCK_BYTES + 1, 5, False), (1000, PER_THREAD_STREAM, False)],
)
def test_not_kept(memory, gpu, nbytes, stream, capturing):
    kept = memory.take(1000, 5, False)
    give(kept)
    for _ in range(2):
        before = gpu.used
        address, back, holder = memory.take(nbytes, stream, capturing)
        assert gpu.used - before >= nbytes, "not from the library's allocator"
        assert holder.data_ptr() == address
        back.append((address, back, holder))
        assert not back, "it is held"
    assert memory.take(1000, 5, False) is kept


def test_streams_have_their_own(memory):
    streams = range(10, 10 + MAX_BLOCKS)
    blocks = [memory.take(1000, stream, False) for stream in streams]
    assert len({block[0] for block in blocks}) == MAX_BLOCKS
    for block in blocks:
        give(block)
    for _ in range(2):
        other = memory.take(1000, 5, False)
        give(other)
        assert other[2] is not None, "streams without end hold memory without end"
    assert [memory.take(1000, stream, False) for stream in streams] == blocks


def test_the_driver_has_no_memory_left(memory, gpu, monkeypatch):
    kept = memory.take(1000, 5, False)
    asked: list[int] = []
    monkeypatch.setattr(driver, "allocate", asked.append)
    for stream in (5, 6, 6):
        assert memory.take(1000, stream, False)[2] is not None
    assert asked == [BLOCK_BYTES], "asked again, which takes long"
    give(kept)
    assert memory.take(1000, 5, False) is kept


WITH_SCRATCH = {64: "bf16_cluster_sm90", 16: "bf16_grouped_sm90"}  # kernels that take scratch memory, by heads


@pytest.mark.parametrize("h_q", [16, 64])
def test_an_error_between(gpu, monkeypatch, force, h_q):
    """A call that raises gives its block back."""
    force(WITH_SCRATCH[h_q])
    s_q = 4 if h_q == 64 else 512
    given = [torch.zeros((s_q, h_q, 576), dtype=torch.bfloat16), torch.zeros((99, 1, 576), dtype=torch.bfloat16)]
    indices = torch.zeros((s_q, 1, 512), dtype=torch.int32)
    made: list[int] = []
    allocate = driver.allocate
    monkeypatch.setattr(driver, "allocate", lambda nbytes: made.append(nbytes) or allocate(nbytes))
    for _ in range(3):
        cupy_mla.sparse_prefill(*given, indices, 0.05)
    assert made == [BLOCK_BYTES], "the call has no scratch memory"
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "log", None)
            with pytest.raises((AttributeError, TypeError)):
                cupy_mla.sparse_prefill(*given, indices, 0.05)
    cupy_mla.sparse_prefill(*given, indices, 0.05)
    assert made == [BLOCK_BYTES]


# --- on a GPU -------------------------------------------------------------------------------------------------


class Calls:
    """Calls of sparse_prefill with inputs of their own, and what they should return.

    Attributes:
        results: of all calls.
    """

    def __init__(self, rng: np.random.Generator, s_q: int, h_q: int) -> None:
        given = prefill_inputs(rng, s_q, h_q, 576, 2000, 512)
        self._kind = TorchCUDA()
        self._arrays = [self._kind.put(a) for a in given]
        self._wanted = oracle.prefill(*given, 0.05)[0]
        self.results: list[Any] = []

    def __call__(self) -> None:
        self.results.append(cupy_mla.sparse_prefill(*self._arrays, 0.05)[0])

    def check(self) -> None:
        oracle.assert_close(self._kind.take(self.results[0]), self._wanted, "prefill out")
        assert all(torch.equal(self.results[0], other) for other in self.results), "another call used its memory"


@pytest.fixture
def takes(monkeypatch) -> Iterator[list[tuple[int, bool]]]:
    """The stream of each call that took scratch memory, and whether that was captured. No block is there before."""
    seen: list[tuple[int, bool]] = []
    take = ScratchMemory.take

    def noted(memory: ScratchMemory, nbytes: int, stream: int, capturing: bool) -> Any:
        seen.append((stream, capturing))
        return take(memory, nbytes, stream, capturing)

    monkeypatch.setattr(ScratchMemory, "take", noted)
    monkeypatch.setattr(prepared, "scratch_memory", cache(scratch_memory.__wrapped__))
    forget_calls()
    yield seen
    forget_calls()


SHAPES = pytest.mark.parametrize(("s_q", "h_q"), [(4, 64), (512, 16)])


@pytest.mark.gpu
@SHAPES
@pytest.mark.parametrize("streams", [1, 2])
def test_threads_and_a_graph(rng, takes, force, s_q, h_q, streams):
    """Calls of two threads, on one stream or on one each, and a captured one on another stream, at the same time."""
    force(WITH_SCRATCH[h_q])
    first, second, replayed = (Calls(rng, s_q, h_q) for _ in range(3))
    replayed()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed()
    captured = replayed.results.pop()
    assert [capturing for _, capturing in takes] == [False, True], "these calls have no scratch memory"
    chosen = [torch.cuda.Stream() for _ in range(streams)]

    def repeat(calls: Calls, stream: Any) -> None:
        with torch.cuda.stream(stream):
            for _ in range(50):
                calls()

    threads = [threading.Thread(target=repeat, args=(c, s)) for c, s in zip((first, second), 2 * chosen, strict=False)]
    for thread in threads:
        thread.start()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            graph.replay()
            replayed.results.append(captured.clone())
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for calls in (first, second, replayed):
        calls.check()


@pytest.mark.gpu
@SHAPES
def test_two_streams_in_turn(rng, takes, force, s_q, h_q):
    """Calls of one thread, whose launches wait behind others."""
    force(WITH_SCRATCH[h_q])
    sides = [(Calls(rng, s_q, h_q), torch.cuda.Stream()) for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        for calls, stream in sides:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000)
                calls()
    torch.cuda.synchronize()
    assert len(set(takes)) == 2
    for calls, _ in sides:
        calls.check()


@pytest.mark.gpu
def test_more_streams_than_blocks(rng, takes):
    calls = Calls(rng, 4, 64)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2 * MAX_BLOCKS)]
    for stream in 2 * streams:
        with torch.cuda.stream(stream):
            calls()
    torch.cuda.synchronize()
    assert len(set(takes)) > MAX_BLOCKS
    calls.check()


@pytest.mark.gpu
def test_first_block_while_another_thread_captures(rng, takes):
    calls = Calls(rng, 4, 64)
    calls()
    torch.cuda.synchronize()
    taken: list[Any] = []

    def take() -> None:
        driver.THREAD.current_device()
        taken.append(ScratchMemory(LIBRARIES["torch"]).take(1000, 5, False))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        calls()
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert taken[0][2] is None, "not from the driver"
    calls.check()


@pytest.mark.gpu
def test_more_than_the_gpu_has():
    driver.THREAD.current_device()
    assert driver.allocate(1 << 50) is None
    torch.ones(10, device="cuda").sum().item()
