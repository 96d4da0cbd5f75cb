"""A GPU that is none: CPU tensors pass for CUDA ones, CuPy arrays lie on the host, and launches are written down
instead of made.

What operations hand to the driver can so be compared, and what a call costs the host measured, without a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import threading
from contextlib import nullcontext
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupy_mla.arrays import HOST, aligned_up
from cupy_mla.bridges import CuPyLibrary, Place, TorchLibrary, to_numpy
from cupy_mla.calls import prepared
from cupy_mla.calls.scratch import scratch_memory
from cupy_mla.cuda import driver
from cupy_mla.cuda.kernel import Kernel, Loaded

from .kinds import CuPy

ARENA_BYTES = 1 << 29
SMS, CAPABILITY = 132, 90
_SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # by capability


class Submitted(NamedTuple):
    """One thing that went to the driver: a launch of a kernel, or a memset (address, value, bytes)."""

    kernel: Kernel | None
    grid: tuple[int, ...]  # and the CTAs of a cluster
    stream: int
    params: bytes | tuple[int, int, int]


class FakeGPU:
    """Stands in for device 0 while a monkeypatch lasts.

    Attributes:
        log: what went to the driver, in order.
        stream: the caller's current stream.
        used: bytes of memory in use; set to 0, the next allocations are those of before.
        threads: those that made themselves a CUDA context.
        capturing, capture: whether streams are being captured; the capture's number.
        kernels: by their handles.
        graphs: the driver's functions for graphs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sms: int = SMS, capability: int = CAPABILITY) -> None:
        self.log: list[Submitted] = []
        self.stream = 0
        self.used = 0
        self.threads: list[threading.Thread] = []
        self.capturing = False
        self.capture = 0
        self.kernels: dict[int, Kernel] = {}
        self.graphs = FakeGraphs(self)
        self._whole = Place("torch", HOST).empty((ARENA_BYTES,), np.dtype(np.uint8))
        self._arena = TorchLibrary().host_view(self._whole, np.dtype(np.uint8))

        def load(kernel: Kernel, device: int) -> Loaded:
            self.kernels[id(kernel)] = kernel

            def submit(stream: int, x: int, y: int, z: int, params: bytes, cluster: int) -> None:
                assert len(params) == kernel.params.size
                self.take(Submitted(kernel, (x, y, z, cluster), stream, params))

            return Loaded(id(kernel), 1, 0, submit)

        def memset(address: int, value: int, nbytes: int, stream: int) -> None:
            self.take(Submitted(None, (), stream, (address, value, nbytes)))

        def set_device(device: int) -> None:
            self.threads.append(threading.current_thread())

        clusters_at_once = tuple(sms // n for n in range(1, driver.MAX_CLUSTER + 1))
        runtime = SimpleNamespace(
            getDevice=lambda: 0, setDevice=set_device, memsetAsync=memset, streamIsCapturing=lambda _: self.capturing,
            graphLaunch=self.graphs.launch,
        )  # fmt: skip
        monkeypatch.setattr(driver, "runtime", lambda: runtime)
        monkeypatch.setattr(driver, "THREAD", driver._Threads())
        monkeypatch.setattr(
            driver, "gpu", cache(lambda device: driver.Gpu(device, sms, capability, _SHARED_KB[capability]))
        )
        monkeypatch.setattr(driver, "driver_version", lambda: 13000)
        monkeypatch.setattr(driver, "clusters_at_once", lambda kernel, device: clusters_at_once)
        monkeypatch.setattr(driver, "api", lambda: self.graphs)
        monkeypatch.setattr(driver, "allocate", lambda nbytes: self.malloc(nbytes).ptr)
        monkeypatch.setattr(prepared, "scratch_memory", cache(scratch_memory.__wrapped__))
        monkeypatch.setattr(Kernel, "load", load)
        for library in (TorchLibrary, CuPyLibrary):
            monkeypatch.setattr(library, "to_device", lambda library, device: nullcontext())
            monkeypatch.setattr(library, "device_reader", lambda library: runtime.getDevice)
            monkeypatch.setattr(library, "stream_reader", lambda library, device: lambda: self.stream)
        monkeypatch.setattr(Place, "is_capturing", lambda place: self.capturing)
        monkeypatch.setattr("cupy_mla.checks.values.to_numpy", _read)
        monkeypatch.setattr(TorchLibrary, "device_of", lambda library, tensor: 0)
        monkeypatch.setattr(TorchLibrary, "maker", lambda library: self._empty)

    def take(self, submitted: Submitted) -> None:
        """What the driver gets."""
        self.log.append(submitted)

    def _empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        """A tensor without gaps in the arena."""
        start, size = self.used, math.prod(shape) * dtype.itemsize
        self.used += aligned_up(size)
        return self._whole[start : start + size].view(dtype).as_strided(shape, strides)

    def malloc(self, nbytes: int) -> Any:
        """Memory for CuPy, from where a tensor would lie: for `cupy.cuda.using_allocator`."""
        start = self.used
        self.used += aligned_up(nbytes)
        return _pointer(self._arena, start)


class FakeGraphs:
    """The driver's functions for CUDA graphs of kernels, which are written down when a graph runs.

    Attributes:
        made: what graphs and executable ones launch, node by node, until they are destroyed.
        runs: of graphs.
        changes: of launches' parameters.
    """

    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu
        self._handles = count(1)
        self.made: dict[int, dict[int, Submitted]] = {}
        self.runs = self.changes = 0

    def _read(self, node: Any) -> Submitted:
        kernel = self._gpu.kernels[node.func]
        assert (node.blockDimX, node.blockDimY, node.blockDimZ, node.sharedMemBytes) == (1, 1, 1, 0)
        start = ctypes.c_void_p.from_address(node.kernelParams).value
        grid = (node.gridDimX, node.gridDimY, node.gridDimZ, 1)
        return Submitted(kernel, grid, 0, ctypes.string_at(start, kernel.params.size))

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:
        return 0, mode

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[int, int, int]:
        assert self._gpu.capturing
        return 0, 1, self._gpu.capture

    def cuGraphCreate(self, flags: int) -> tuple[int, int]:
        graph = next(self._handles)
        self.made[graph] = {}
        return 0, graph

    def cuGraphAddKernelNode(self, graph: int, before: list[int], number: int, params: Any) -> tuple[int, int]:
        nodes = self.made[graph]
        assert (before, number) == (list(nodes)[-1:], len(before)), "not behind the last one"
        node = next(self._handles)
        nodes[node] = self._read(params)
        return 0, node

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[int, int]:
        executable = next(self._handles)
        self.made[executable] = dict(self.made[graph])
        return 0, executable

    def cuGraphExecKernelNodeSetParams(self, executable: int, node: int, params: Any) -> tuple[int]:
        before = self.made[executable][node]
        now = self.made[executable][node] = self._read(params)
        assert now.kernel is before.kernel
        self.changes += 1
        return (0,)

    def launch(self, executable: int, stream: int) -> None:
        for launch in self.made[executable].values():
            self._gpu.take(launch._replace(stream=stream))
        self.runs += 1

    def cuGraphDestroy(self, handle: int) -> tuple[int]:
        del self.made[handle]
        return (0,)

    cuGraphExecDestroy = cuGraphDestroy


class HostCuPy(CuPy):
    """CuPy arrays in the host's memory, which only a FakeGPU's kernels can be given."""

    def whole(self, raw: np.ndarray) -> Any:
        return self.cupy.ndarray(raw.shape, np.uint8, _pointer(raw.copy(), 0))


def _read(array: Any) -> np.ndarray:
    """The values of an array in the fake GPU's memory."""
    if not hasattr(array, "data_ptr"):
        whole = (ctypes.c_byte * max(array.nbytes, 1)).from_address(array.data.ptr)
        return np.ndarray(array.shape, array.dtype, whole).copy()  # without gaps, as tests make them
    return to_numpy(array)


def _pointer(memory: np.ndarray, start: int) -> Any:
    """What CuPy has for an address on a GPU."""
    cuda = importlib.import_module("cupy").cuda
    return cuda.MemoryPointer(cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, 0), start)
