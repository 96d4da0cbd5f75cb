"""Neighbouring launches of a call as one CUDA graph, which takes less host time than single launches.

On an H200's host a launch takes 4 to 5 us, a graph of three launches 3 us, and 1.2 us more for each launch whose
parameters differ from the graph's last run. Launches whose grids differ are made one by one: to change three grids in
the graph took 29 us.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from ctypes import addressof
from typing import Any

from ..cuda import driver
from ..cuda.kernel import Kernel

Given = tuple[int, int, int, bytes]  # a launch's grid and parameters


def _destroy(name: str, handle: Any) -> None:
    with driver.relaxed_capture():
        driver.call(name, handle)


class _Node:
    """A launch in a graph, with memory of its own for the parameters.

    Attributes:
        given: grid and parameters of the graph's next run.
        params: the driver's structure for it.
        handle: the driver's handle, once it is in a graph.
    """

    def __init__(self, kernel: Kernel, device: int, given: Given) -> None:
        loaded, params = kernel.load(device), given[3]
        self._buffer = ctypes.create_string_buffer(params, len(params))
        self._pointer = ctypes.c_void_p(addressof(self._buffer))
        self.params = driver.api().CUDA_KERNEL_NODE_PARAMS()
        self.params.func = loaded.handle
        self.params.blockDimX, self.params.blockDimY, self.params.blockDimZ = loaded.threads, 1, 1
        self.params.sharedMemBytes = loaded.shared_bytes
        self.params.kernelParams = addressof(self._pointer)
        self.handle: Any = None
        self._grid: tuple[int, ...] = ()
        self.take(given)

    def take(self, given: Given) -> None:
        """Change grid and parameters."""
        if given[:3] != self._grid:
            self._grid = given[:3]
            self.params.gridDimX, self.params.gridDimY, self.params.gridDimZ = self._grid
        self._buffer.raw = given[3]
        self.given = given


class LaunchGraph:
    """Launches one after the other, of the same kernels each time, with other grids and parameters.

    Several threads and streams may share it; its runs wait for each other on the GPU.

    Args:
        kernels: the kernels that are launched, in order.
        device: the GPU.
    """

    def __init__(self, kernels: Sequence[Kernel], device: int) -> None:
        self.kernels = kernels
        self._device = device
        self._lock = threading.Lock()  # of parameters until the graph is launched
        self._executable: Any = None
        self._nodes: list[_Node] = []
        self._grids: list[tuple[int, ...]] = []  # of the last call

    def __call__(self, stream: int, *launches: Given) -> None:
        """Launch on a stream of the current device.

        Launches are made one by one where a grid differs from the last call's, since changing it in the graph takes
        longer, and on a stream that is being captured, which takes no graph.
        """
        grids: list[tuple[int, ...]] = [given[:3] for given in launches]
        same, self._grids = grids == self._grids, grids
        if not same or driver.is_capturing(stream):
            for kernel, given in zip(self.kernels, launches, strict=True):
                kernel.submitter(self._device)(stream, *given, 1)
            return
        with self._lock:
            if self._executable is None:
                self._make(launches)
            for node, given in zip(self._nodes, launches, strict=True):
                if node.given != given:
                    node.take(given)
                    driver.call("cuGraphExecKernelNodeSetParams", self._executable, node.handle, node.params)
            driver.call("cuGraphLaunch", self._executable, stream)

    def _make(self, launches: Sequence[Given]) -> None:
        nodes: list[_Node] = []
        with driver.relaxed_capture():
            graph = self._own("cuGraphDestroy", driver.call("cuGraphCreate", 0))
            for kernel, given in zip(self.kernels, launches, strict=True):
                node = _Node(kernel, self._device, given)
                before = [nodes[-1].handle] if nodes else []
                node.handle = driver.call("cuGraphAddKernelNode", graph, before, len(before), node.params)
                nodes.append(node)
            executable = self._own("cuGraphExecDestroy", driver.call("cuGraphInstantiate", graph, 0))
        self._nodes, self._executable = nodes, executable

    def _own(self, destroy: str, handle: Any) -> Any:
        """A handle; the driver's function `destroy` destroys it together with this object."""
        weakref.finalize(self, _destroy, destroy, handle).atexit = False
        return handle
