"""A GPU that is none: CPU tensors pass for CUDA ones, CuPy arrays lie on the host, and launches are written down
instead of made.

What operations hand to the driver can so be compared, and what a call costs the host measured, without a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupy_mla.arrays import HOST, Array, Place, aligned_up
from cupy_mla.cuda import jit, launch_graph

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
        capturing: whether streams are being captured.
        kernels: by their handles.
        param_bytes: of kernels that were launched, by their handles.
        graphs: the driver's functions for graphs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Submitted] = []
        self.stream = 0
        self.used = 0
        self.threads: list[threading.Thread] = []
        self.capturing = False
        self.kernels: dict[int, jit.Kernel] = {}
        self.param_bytes: dict[int, int] = {}
        self.graphs = FakeGraphs(self)
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

        def load(kernel: jit.Kernel, device: int) -> int:
            self.kernels[id(kernel)] = kernel
            return id(kernel)

        def submitter(
            kernel: jit.Kernel, function: int, grid: tuple[int, int, int], attributes: list[jit._Attribute]
        ) -> jit.Submit:
            assert function == id(kernel)
            cluster = next((a.value[0] for a in attributes if a.id == jit._CLUSTER_DIMENSION), 1)

            def submit(stream: int, params: bytes) -> None:
                self.param_bytes[function] = len(params)
                self.log.append(Submitted(kernel, (*grid, cluster), stream, params))

            return submit

        def memset(address: int, value: int, nbytes: int, stream: int) -> None:
            self.log.append(Submitted(None, (), stream, (address, value, nbytes)))

        def set_device(device: int) -> None:
            self.threads.append(threading.current_thread())

        runtime = SimpleNamespace(
            getDevice=lambda: 0, setDevice=set_device, memsetAsync=memset, streamIsCapturing=lambda _: self.capturing
        )
        monkeypatch.setattr(jit, "_runtime", lambda: runtime)
        monkeypatch.setattr(jit, "THREAD", jit._Threads())
        monkeypatch.setattr(jit, "_properties", lambda device: {"multiProcessorCount": 132, "major": 9, "minor": 0})
        monkeypatch.setattr(jit, "driver_version", lambda: 13000)
        monkeypatch.setattr(jit.Kernel, "load", load)
        monkeypatch.setattr(jit.Kernel, "_submitter", submitter)
        monkeypatch.setattr(
            jit.Kernel, "clusters_at_once", lambda kernel, device: tuple(132 // n for n in range(1, 17))
        )
        monkeypatch.setattr(launch_graph, "_driver", lambda: self.graphs)
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


class FakeGraphs:
    """The driver's functions for CUDA graphs of kernels, which are written down when a graph runs.

    Attributes:
        made: what graphs and executable ones launch, node by node, until they are destroyed.
        runs: of graphs.
        changes: of launches' parameters.
    """

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu
        self._handles = count(1)
        self.made: dict[int, dict[int, Submitted]] = {}
        self.runs = self.changes = 0

    def _hand_out(self, address: int) -> int:
        handle = next(self._handles)
        ctypes.c_void_p.from_address(address).value = handle
        return handle

    def _read(self, params: int) -> Submitted:
        node = launch_graph._NodeParams.from_address(params)
        kernel = self._gpu.kernels[node.function]
        assert (*node.block, node.shared_bytes, node.extra) == (kernel.threads, 1, 1, kernel.shared_bytes, None)
        start = ctypes.c_void_p.from_address(node.params).value
        return Submitted(kernel, (*node.grid, 1), 0, ctypes.string_at(start, self._gpu.param_bytes[node.function]))

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> int:
        return 0

    def cuGraphCreate(self, graph: int, flags: int) -> int:
        self.made[self._hand_out(graph)] = {}
        return 0

    def cuGraphAddKernelNode(self, node: int, graph: int, before: int, number: int, params: int) -> int:
        nodes = self.made[graph]
        assert [ctypes.c_void_p.from_address(before).value][:number] == list(nodes)[-1:], "not behind the last one"
        nodes[self._hand_out(node)] = self._read(params)
        return 0

    def cuGraphInstantiateWithFlags(self, executable: int, graph: int, flags: int) -> int:
        self.made[self._hand_out(executable)] = dict(self.made[graph])
        return 0

    def cuGraphExecKernelNodeSetParams(self, executable: int, node: int, params: int) -> int:
        before = self.made[executable][node]
        now = self.made[executable][node] = self._read(params)
        assert (now.kernel, now.grid) == (before.kernel, before.grid)
        self.changes += 1
        return 0

    def cuGraphLaunch(self, executable: int, stream: int) -> int:
        self._gpu.log += [launch._replace(stream=stream) for launch in self.made[executable].values()]
        self.runs += 1
        return 0

    def cuGraphDestroy(self, handle: int) -> int:
        del self.made[handle]
        return 0

    cuGraphExecDestroy = cuGraphDestroy


class HostCuPy(CuPy):
    """CuPy arrays in the host's memory, which only a FakeGPU's kernels can be given."""

    def whole(self, raw: np.ndarray) -> Any:
        return self.cupy.ndarray(raw.shape, np.uint8, _pointer(raw.copy(), 0))


def _pointer(memory: np.ndarray, start: int) -> Any:
    """What CuPy has for an address on a GPU."""
    cuda = importlib.import_module("cupy").cuda
    return cuda.MemoryPointer(cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, 0), start)
