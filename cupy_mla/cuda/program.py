"""Programs: what a call does on the GPU, as a plain value. A launcher returns it, `cupy_mla.calls` runs it.

A `Program` is a list of steps: launches of kernels, and memory to be cleared. A step names memory by `Pointer`s, each a
buffer and an offset in bytes. A buffer is an array argument, a result, or scratch memory of the call. So a program can
run again with other addresses. A field of a parameter struct may also be a `Nonce`, which is another number in each
run, or a `PlanField`, the address or the state of a `Plan` that several calls share.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import UINT8
from .kernel import Kernel
from .structs import Packed

ALIGNMENT = 16  # bytes: launchers know an address modulo this
PLAN_BYTES = 4096


class Buffer:
    """Memory that a program works on: an argument, a result, or scratch.

    Attributes:
        name: for error messages and debugging.
        number: the place among the call's arrays, results behind the arguments; None: it is scratch memory.
        shape, dtype: those of scratch memory.
    """

    __slots__ = ("dtype", "name", "number", "shape")
    name: str
    number: int | None
    shape: tuple[int, ...]
    dtype: np.dtype

    def __init__(
        self, name: str, number: int | None = None, shape: tuple[int, ...] = (), dtype: np.dtype = UINT8
    ) -> None:
        self.name = name
        self.number = number
        self.shape = shape
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def nbytes(self) -> int:
        """Bytes of what the call allocates."""
        size = self.dtype.itemsize
        for length in self.shape:
            size = size * length
        return size

    @property
    def ptr(self) -> Pointer:
        """Its first byte."""
        return Pointer(self)


class Pointer:
    """An address: a buffer, and an offset in bytes.

    Attributes:
        start: where the buffer starts, modulo ALIGNMENT. What the call allocates starts at a multiple of 256 bytes.
        number: that of the buffer; None also within a buffer.
    """

    __slots__ = ("buffer", "number", "offset", "start")
    buffer: Buffer
    offset: int
    start: int
    number: int | None

    def __init__(self, buffer: Buffer, offset: int = 0, start: int = 0) -> None:
        self.buffer = buffer
        self.offset = offset
        self.start = start
        self.number = None if offset else buffer.number

    @staticmethod
    @lru_cache(maxsize=1024)
    def to(name: str, number: int, start: int = 0) -> Pointer:
        """The pointer to an argument or a result."""
        return Pointer(Buffer(name, number), 0, start)

    def __add__(self, nbytes: int) -> Pointer:
        return Pointer(self.buffer, self.offset + nbytes, self.start)

    __radd__ = __add__

    def __mod__(self, nbytes: int) -> int:
        """The address modulo `nbytes`, which must divide `ALIGNMENT`: calls of one key agree on no more."""
        if ALIGNMENT % nbytes:
            raise ValueError(f"alignment to {nbytes} bytes: calls that are alike agree on addresses modulo {ALIGNMENT}")
        return (self.start + self.offset) % nbytes

    def __repr__(self) -> str:
        return f"{self.buffer!r} + {self.offset}"


class Nonce:
    """A field of a parameter struct: a multiple of 4 that no other run of any program has."""

    number = None
    _numbers = count(int.from_bytes(os.urandom(7), "little") * 4, 4)

    @classmethod
    def next(cls) -> int:
        """The number for the next run."""
        return next(cls._numbers)


class Plan:
    """How the work of several calls is divided over CTAs, as of the layers of a step. The first call's kernel finds
    that out and leaves it in GPU memory, and later calls load it.

    A plan is an argument of these calls. On the host it holds nothing. A copy of it is another plan.

    Attributes:
        made: what the plan is for and where it lies (`calls/plan.py`); empty before the first call.
    """

    __slots__ = ("made",)
    made: tuple[Any, ...]

    def __init__(self) -> None:
        self.made = ()

    def __reduce__(self) -> tuple[type[Plan], tuple[()]]:
        return Plan, ()


class PlanField(NamedTuple):
    """A field of a parameter struct that tells of a plan.

    Attributes:
        plan: the plan.
        key: sizes. Only calls with the same sizes share a plan.
        name: "address", of PLAN_BYTES on the GPU; or "filled", whether an earlier launch filled them.
    """

    plan: Plan
    key: tuple[Any, ...]
    name: str

    @property
    def number(self) -> None:
        """As of `Pointer`."""


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        grid: CTAs along x, y, z.
        params: the kernel's one parameter.
        cluster: neighbouring CTAs along x that form a thread-block cluster.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    params: Packed
    cluster: int = 1


class Clear(NamedTuple):
    """A step that sets bytes to zero."""

    pointer: Pointer
    nbytes: int


Step = Launch | Clear
Program = Sequence[Step]
