"""Metadata on its way to the GPU: arrays at fixed addresses that the host rewrites without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..arrays import HOST, aligned_up
from ..bridges import Place, describe, require_cupy
from ..dtypes import UINT8


class _Field(NamedTuple):
    start: int  # bytes
    shape: tuple[int, ...]
    dtype: np.dtype


class Uploads:
    """Named arrays at addresses that never change, which the host rewrites without waiting for the device.

    The arrays lie in one allocation, in the order given, and go up together in one asynchronous copy from pinned
    memory on the caller's current stream. The host writes into a staging area whose last copy has ended; there are
    two, and when it runs further ahead than that it makes another, so it never waits. For a place on the host,
    writing is all there is.

    Attributes:
        arrays: the arrays by name, zeros before the first upload.
    """

    def __init__(self, place: Place, fields: dict[str, tuple[tuple[int, ...], np.dtype]]) -> None:
        self.place = place
        self._fields: dict[str, _Field] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            self._fields[name] = _Field(size, shape, dtype)
            size = aligned_up(size + math.prod(shape) * dtype.itemsize)
        self._whole = place.empty((size,), UINT8)
        self._whole[...] = 0
        self.arrays: dict[str, Any] = {name: place.carve(self._whole, *field) for name, field in self._fields.items()}
        self._staging = [_Staging(place.device, size) for _ in range(2)] if place.on_gpu else []

    def upload(self, write: Callable[[dict[str, np.ndarray]], int]) -> None:
        """Rewrite the arrays.

        Args:
            write: fills the host's copies of the arrays, whose old contents are arbitrary, and returns how many rows
                of the last one are to go up; all others go up whole.
        """
        if not self.place.on_gpu:
            write({name: describe(name, array).numpy() for name, array in self.arrays.items()})
            return
        whole = describe("whole", self._whole)
        staging = next((s for s in self._staging if s.free()), None)
        if staging is None:
            staging = _Staging(self.place.device, whole.shape[0])
            self._staging.append(staging)
        host = Place("numpy", HOST)
        rows = write({name: host.carve(staging.bytes, *field) for name, field in self._fields.items()})
        last = list(self._fields.values())[-1]
        size = last.start + rows * math.prod(last.shape[1:]) * last.dtype.itemsize
        staging.copy(whole.ptr, size, self.place.stream())

    def put(self, known: dict[str, Any]) -> None:
        """Write arrays that the device has at the start of those of the same name, in order after the last upload."""
        for name, values in known.items():
            self.arrays[name][: len(values)] = values


class _Staging:
    """Pinned host memory, and the event that says when the last copy out of it has ended."""

    def __init__(self, device: int, size: int) -> None:
        self._cuda = require_cupy("a CUDA array").cuda
        self._device = device
        with self._cuda.Device(device):
            self._copied = self._cuda.Event(disable_timing=True)
            self.bytes = np.frombuffer(self._cuda.alloc_pinned_memory(size), np.uint8, size)

    def free(self) -> bool:
        return self._copied.done

    def copy(self, to: int, size: int, stream: int) -> None:
        runtime = self._cuda.runtime
        with self._cuda.Device(self._device):
            runtime.memcpyAsync(to, self.bytes.ctypes.data, size, runtime.memcpyHostToDevice, stream)
            runtime.eventRecord(self._copied.ptr, stream)
