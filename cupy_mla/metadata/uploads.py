"""Arrays at fixed addresses on a GPU, which the host rewrites without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..arrays import HOST, aligned_up
from ..bridges import Place, describe, require_cupy
from ..dtypes import UINT8


class _Field(NamedTuple):
    """An array: the first byte in the allocation, shape and dtype."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype


class Uploads:
    """Named arrays at addresses that never change, which the host rewrites without waiting for the device.

    The arrays lie in one allocation, in the order given. One asynchronous copy from pinned memory on the caller's
    current stream uploads all. The host writes into a staging area whose last copy has ended. There are two; if neither
    is free, it makes another one, so it never waits. In a place on the host it writes the arrays themselves.

    Args:
        place: where the arrays live.
        fields: shape and dtype of each array by its name.

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
            write: fills the host's copies of the arrays, whose contents are arbitrary before. It returns how many rows
                of the last one are to be uploaded; all others are uploaded as a whole.
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
        """Copy arrays on the device to the start of those of the same name, in order behind the last upload."""
        for name, values in known.items():
            self.arrays[name][: len(values)] = values


class _Staging:
    """Pinned host memory, and an event that is done when the last copy from it has ended."""

    def __init__(self, device: int, size: int) -> None:
        self._cuda = require_cupy("a CUDA array").cuda
        self._device = device
        with self._cuda.Device(device):
            self._copied = self._cuda.Event(disable_timing=True)
            self.bytes = np.frombuffer(self._cuda.alloc_pinned_memory(size), np.uint8, size)

    def free(self) -> bool:
        """Whether the memory may be written."""
        return self._copied.done

    def copy(self, to: int, size: int, stream: int) -> None:
        """Copy the first `size` bytes to an address of the device, asynchronously on a stream."""
        runtime = self._cuda.runtime
        with self._cuda.Device(self._device):
            runtime.memcpyAsync(to, self.bytes.ctypes.data, size, runtime.memcpyHostToDevice, stream)
            runtime.eventRecord(self._copied.ptr, stream)
