"""Scratch memory that the layers of a model share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays import aligned_up
from ..bridges import Place, as_dtype, describe
from ..checks.options import require_integer, shown
from ..dtypes import UINT8
from ..typing import AnyArray

ALIGNMENT = 256  # bytes, of every view


class Workspace:
    """Scratch memory as views of one allocation, which grows to the largest request.

    The views of one call do not overlap. Those of different calls do, so contents last until the next call only. A
    captured CUDA graph keeps the addresses that it saw: reserve the largest request first, then `lock`.

    Args:
        place: where the memory lives, (kind of array, device); see `SparseMLAMetadataBuilder`.
    """

    def __init__(self, place: tuple[str, int]) -> None:
        self.place: Place = Place.from_pair(place)
        self.locked: bool = False
        self._whole: Any = None
        self._start = 0  # bytes to the first aligned address
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes that one call can get without growth."""
        return self._size

    def lock(self) -> None:
        """Forbid growth from now on."""
        self.locked = True

    def get_simultaneous(self, *specs: tuple[tuple[int, ...], Any]) -> list[AnyArray]:
        """Views of the allocation, one for each (shape, dtype), that do not overlap; contents are arbitrary.

        Raises:
            RuntimeError: the workspace is locked and too small.
            TypeError, ValueError: something asked for is no pair of a shape and a dtype.
        """
        described = [_described(spec) for spec in specs]
        starts, size = [], 0
        for shape, dtype in described:
            starts.append(size)
            size = aligned_up(size + math.prod(shape) * dtype.itemsize, ALIGNMENT)
        if self._whole is None or size > self._size:
            self._grow(size)
        return [
            self.place.carve(self._whole, self._start + start, shape, dtype)
            for start, (shape, dtype) in zip(starts, described, strict=True)
        ]

    def _grow(self, size: int) -> None:
        if self.locked and size > self._size:
            raise RuntimeError(f"the workspace is locked at {self._size} bytes, {size} were asked for")
        self._whole = self.place.empty((size + ALIGNMENT,), UINT8)
        self._start = -describe("workspace", self._whole).ptr % ALIGNMENT
        self._size = size


def _described(spec: Any) -> tuple[tuple[int, ...], np.dtype]:
    """A spec's shape and dtype, checked."""
    try:
        shape, dtype = spec
        lengths = tuple(shape)
    except (TypeError, ValueError):
        raise TypeError(
            f"specs: expected pairs of a shape and a dtype, as ((3, 512), 'int32'), got {shown(spec)}"
        ) from None
    return tuple(require_integer("specs: a length", n, 0) for n in lengths), as_dtype(dtype)
