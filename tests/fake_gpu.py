"""A GPU that is none: CPU tensors pass for CUDA ones, CuPy arrays lie on the host, and launches are written down
instead of made.

What operations hand to the driver can so be compared, and what a call costs the host measured, without a GPU.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupy_mla.arrays import HOST, Array, Place, aligned_up
from cupy_mla.cuda import jit

from .kinds import CuPy

ARENA_BYTES = 1 << 29


class Submitted(NamedTuple):
    """One thing that went to the driver: a launch of a kernel, or a memset (address, value, bytes)."""

    kernel: jit.Kernel | None
    grid: tuple[int, ...]  # and the blocks of a cluster
    stream: int
    params: bytes | tuple[int, int, int]


class FakeGPU:
    """Stands in for device 0 while a monkeypatch lasts.

    Attributes:
        log: what went to the driver, in order.
        stream: the caller's current stream.
        used: bytes of memory in use; set to 0, the next allocations are those of before.
        threads: those that made themselves a CUDA context.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Submitted] = []
        self.stream = 0
        self.used = 0
        self.threads: list[threading.Thread] = []
        whole = Place("torch", HOST).empty((ARENA_BYTES,), np.dtype(np.uint8))
        self._arena = whole.numpy()
        describe, real_maker = Array._describe_tensor, Place._maker

        def describe_as_cuda(array: Array, tensor: Any) -> None:
            describe(array, tensor)
            array.device = 0

        def maker(place: Place, shape: tuple[int, ...], dtype: np.dtype) -> Callable[..., Any]:
            if place.kind == "cupy":
                return real_maker(place, shape, dtype)

            def make() -> Any:
                start = self.used
                self.used += aligned_up(math.prod(shape) * dtype.itemsize)
                return Place("torch", HOST).carve(whole, start, shape, dtype)

            return make

        def submitter(
            kernel: jit.Kernel, device: int, function: int, grid: tuple[int, int, int], *more: int
        ) -> jit.Submit:
            assert function == id(kernel)
            return lambda stream, params: self.log.append(Submitted(kernel, (*grid, *more), stream, params))

        def memset(address: int, value: int, nbytes: int, stream: int) -> None:
            self.log.append(Submitted(None, (), stream, (address, value, nbytes)))

        def set_device(device: int) -> None:
            self.threads.append(threading.current_thread())

        runtime = SimpleNamespace(getDevice=lambda: 0, setDevice=set_device, memsetAsync=memset)
        monkeypatch.setattr(jit, "_runtime", lambda: runtime)
        monkeypatch.setattr(jit, "THREAD", jit._Threads())
        monkeypatch.setattr(jit, "_properties", lambda device: {"multiProcessorCount": 132, "major": 9, "minor": 0})
        monkeypatch.setattr(jit.Kernel, "load", lambda kernel, device: id(kernel))
        monkeypatch.setattr(jit.Kernel, "_submitter", submitter)
        monkeypatch.setattr(
            jit.Kernel, "clusters_at_once", lambda kernel, device: tuple(132 // n for n in range(1, 17))
        )
        monkeypatch.setattr(Array, "_describe_tensor", describe_as_cuda)
        monkeypatch.setattr(Place, "_maker", maker)
        monkeypatch.setattr(Place, "current", lambda place: nullcontext())
        monkeypatch.setattr(Place, "stream", lambda place: self.stream)
        monkeypatch.setattr(Place, "streams", property(lambda place: (lambda: self.stream, "")))

    def malloc(self, nbytes: int) -> Any:
        """Memory for CuPy, from where a tensor would lie: for `cupy.cuda.using_allocator`."""
        start = self.used
        self.used += aligned_up(nbytes)
        return _pointer(self._arena, start)


class HostCuPy(CuPy):
    """CuPy arrays in the host's memory, which only a FakeGPU's kernels can be given."""

    def whole(self, raw: np.ndarray) -> Any:
        return self.cupy.ndarray(raw.shape, np.uint8, _pointer(raw.copy(), 0))


def _pointer(memory: np.ndarray, start: int) -> Any:
    """What CuPy has for an address on a GPU."""
    cuda = importlib.import_module("cupy").cuda
    return cuda.MemoryPointer(cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, 0), start)
