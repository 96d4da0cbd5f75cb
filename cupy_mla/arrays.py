"""The description of an array: address, shape, strides, dtype, and the library and device that it belongs to.

`bridges.describe` makes an `Array` of a NumPy, CuPy or torch array. The operations check it by the methods here. Inside
a call on a GPU (`cupy_mla.calls`) its address is a `cuda.program.Pointer`, because later calls have other addresses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import compress, repeat
from math import gcd
from operator import ge, is_, mul
from types import SimpleNamespace
from typing import Any

import numpy as np

from .dtypes import UINT8

HOST = -1  # the device number of host memory
MOST_WORK = 10**6  # steps to find an item that two arrays share: a fraction of a second
CHECK_VARIABLE = "CUPY_MLA_CHECK"


def _asked_by_environment() -> bool:
    """Whether the environment asks for checks of values."""
    given = os.environ.get(CHECK_VARIABLE, "")
    meanings = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off", ""), False)
    try:
        return meanings[given.strip().lower()]
    except KeyError:
        raise ValueError(f"{CHECK_VARIABLE} must be 1, true, yes, on, or 0, false, no, off, got {given!r}") from None


CHECK_VALUES = _asked_by_environment()  # whether calls check the values of index arrays and lengths


class set_checks:
    """Turn checks of values on or off: from now on, or for a `with` block::

        cupy_mla.set_checks(True)
        with cupy_mla.set_checks(True):
            ...

    They are off at first, unless the environment variable `CUPY_MLA_CHECK` turns them on (1, true, yes, on; 0, false,
    no, off). When they are on, every call of every thread also checks the values of slots, index lists, block tables
    and lengths. It raises `IndexError` for a value out of range, and `ValueError` for two tokens in one slot or two
    requests in the same rows. To read the values back, calls on a GPU wait for it, and none can be captured in a CUDA
    graph.

    Args:
        on: whether values are checked.

    Raises:
        TypeError: `on` is no bool.
    """

    def __init__(self, on: bool) -> None:
        global CHECK_VALUES
        if not isinstance(on, bool):
            raise TypeError(f"on: expected True or False, got {on!r}")
        self._before = CHECK_VALUES
        CHECK_VALUES = on

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        global CHECK_VALUES
        CHECK_VALUES = self._before


class Array:
    """One argument of a call.

    Attributes:
        name: the parameter's name, for error messages.
        obj: the caller's array.
        place: the library and the device that it belongs to, a `bridges.Place`.
        dtype: NumPy's dtype.
        shape: lengths of the axes.
        strides: from item to item along each axis, in items and not in bytes.
        ptr: address of the first item.
        written: whether the call writes it.
        may_be: the input that the caller may give as this output, to have it overwritten.
        read: whether the call looked at its value (`float(array)`).
        wants_gradient: whether autograd follows it.
    """

    name: str
    obj: Any
    place: Any
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    ptr: int
    written: bool = False
    read: bool = False
    wants_gradient: bool = False
    may_be: Array | None = None
    _dropped: int | None = None
    _stored: np.dtype | None = None

    def __init__(
        self,
        name: str,
        obj: Any,
        place: Any,
        dtype: np.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        ptr: int,
    ) -> None:
        self.name = name
        self.obj = obj
        self.place = place
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.ptr = ptr

    @property
    def kind(self) -> str:
        """The library's name: "numpy", "cupy" or "torch"."""
        return self.place.kind

    @property
    def device(self) -> int:
        """`HOST`, or the number of the GPU."""
        return self.place.device

    @property
    def library(self) -> Any:
        """The array's `bridges.Library`."""
        return self.place.library

    def __float__(self) -> float:
        """The value of an array of one item, for code that needs a number."""
        self.read = True
        return float(self.obj)

    def __repr__(self) -> str:
        return f"Array({self.name}: {self.dtype.name}{list(self.shape)}, strides {list(self.strides)}, {self.kind})"

    def require(
        self,
        dtype: np.dtype | tuple[np.dtype, ...],
        *shape: int | str | tuple[int, ...],
        contiguous: bool = True,
    ) -> Array:
        """Check dtype, shape and (unless `contiguous` is False) the contiguous last axis; returns itself.

        A shape entry is a length, several allowed lengths, or a name for a length that may be anything.

        Raises:
            TypeError: wrong dtype.
            ValueError: wrong shape, or a last axis with gaps. Both name the argument.
        """
        # The identity is compared first: to compare a dtype with a tuple takes NumPy long.
        if self.dtype is not dtype and self.dtype not in (dtype if isinstance(dtype, tuple) else (dtype,)):
            wanted = " or ".join(d.name for d in dtype) if isinstance(dtype, tuple) else np.dtype(dtype).name
            raise TypeError(f"{self.name}: expected dtype {wanted}, got {self.dtype.name}")
        if shape != self.shape:
            fits = len(shape) == len(self.shape)
            for want, got in zip(shape, self.shape, strict=False):
                if type(want) is not str and want != got and not (type(want) is tuple and got in want):
                    fits = False
            if not fits:
                wanted = ", ".join(" or ".join(map(str, w)) if isinstance(w, tuple) else str(w) for w in shape)
                raise ValueError(f"{self.name}: expected shape [{wanted}], got {list(self.shape)}")
        strides = self.strides
        if strides[-1:] != (1,) and strides and contiguous and self.shape[-1] > 1 and 0 not in self.shape:
            raise ValueError(
                f"{self.name}: the last axis must be contiguous, got strides {list(self.strides)} (in items)"
            )
        return self

    def require_writable(self) -> Array:
        """Check that the array can be written: its memory is not read-only, no items overlap; returns itself."""
        self.written = True
        if not self.library.writable(self.obj):
            raise ValueError(f"{self.name}: expected a writable array, got a read-only one")
        shape, strides = self.shape, self.strides
        if strides[-1:] == (1,) and all(map(ge, strides, map(mul, strides[1:], shape[1:]))):  # the usual case
            return self
        axes = sorted(zip(map(abs, strides), shape, strict=True))
        if 0 not in shape and not _is_apart(axes):
            raise ValueError(
                f"{self.name}: items overlap in memory (strides {list(self.strides)}), nothing can be written"
            )
        return self

    def require_apart(self, other: Array) -> None:
        """Check that this array, which is written, does not overlap another one. It may be exactly the one of
        `may_be`."""
        same = self.ptr == other.ptr and self.strides == other.strides and self.shape == other.shape
        if self._meets(other) and not (same and self.may_be is not None and self.may_be.name == other.name):
            raise ValueError(f"{self.name}: overlaps {other.name} in memory, which would be read after it is written")

    def _meets(self, other: Array) -> bool:
        """Whether two arrays share memory."""
        (start, end), (other_start, other_end) = self.extent(), other.extent()
        if self.ptr + start >= other.ptr + other_end or other.ptr + other_start >= self.ptr + end:
            return False
        try:  # items of one may lie in gaps of the other
            return np.shares_memory(self._as_numpy(), other._as_numpy(), max_work=MOST_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True

    def extent(self) -> tuple[int, int]:
        """Bytes from its address to the first byte and to that after the last; both 0 for an array without items."""
        shape, strides, size = self.shape, self.strides, self.dtype.itemsize
        if 0 in shape:
            return 0, 0
        start, end = 0, size * (1 + sum(map(mul, strides, shape)) - sum(strides))
        if strides and min(strides) < 0:
            start = size * sum([stride * (n - 1) for stride, n in zip(strides, shape, strict=True) if stride < 0])
            end -= start
        return start, end

    def _as_numpy(self) -> np.ndarray:
        """A NumPy array with the same addresses. They may be those of a GPU, so nothing may be read from it."""
        size = self.dtype.itemsize
        interface = {
            "data": (self.ptr, True),
            "shape": self.shape,
            "strides": tuple(s * size for s in self.strides),
            "typestr": f"|V{size}",
            "version": 3,
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))

    def require_no_gradient(self) -> None:
        """Check that autograd does not follow this array, because the call has no backward."""
        if self.wants_gradient:
            raise RuntimeError(
                f"{self.name} requires a gradient, and this call has no backward: "
                "call under torch.no_grad(), or detach it"
            )

    def without_axis(self, axis: int) -> Array:
        """Drop an axis of length 1 (the single KV head) from the description; returns itself."""
        if self.shape[axis] != 1:
            raise ValueError(f"{self.name}: axis {axis} (KV heads) must have length 1, got shape {list(self.shape)}")
        self.shape = self.shape[:axis] + self.shape[axis + 1 :]
        self.strides = self.strides[:axis] + self.strides[axis + 1 :]
        self._dropped = axis
        return self

    def reinterpreted(self, dtype: np.dtype) -> Array:
        """Take the last axis of bytes, as many as an item of `dtype` has, as one such item; returns itself."""
        size = dtype.itemsize
        self.require(UINT8, *("any",) * (len(self.shape) - 1), size)
        if not self.aligned(size):
            raise ValueError(f"{self.name}: items of {size} bytes must start at multiples of {size} bytes in memory")
        self._stored, self.dtype, self._dropped = self.dtype, dtype, len(self.shape) - 1
        self.shape = self.shape[:-1]
        self.strides = tuple(stride // size for stride in self.strides[:-1])
        return self

    def aligned(self, nbytes: int) -> bool:
        """True when the first item of every row along the last axis starts at a multiple of `nbytes`."""
        if self.ptr % nbytes:
            return False
        size, strides = self.dtype.itemsize, self.strides[:-1]
        if not gcd(*strides) * size % nbytes:
            return True
        return not any(
            length > 1 and stride * size % nbytes for stride, length in zip(strides, self.shape, strict=False)
        )

    def numpy(self) -> np.ndarray:
        """The same host memory as a NumPy array, no copy."""
        view = self.library.host_view(self.obj, self._stored or self.dtype)
        if self._stored is not None:
            view = view.view(self.dtype)
        return view if self._dropped is None else view.squeeze(self._dropped)


def arrays_in(arguments: Iterable[Any]) -> list[Array]:
    """The arrays among the arguments of a call, and in those arguments that are tuples."""
    flat = arguments = [*arguments]
    if True in map(isinstance, arguments, repeat(tuple)):
        flat = []
        for one in arguments:
            flat += one if isinstance(one, tuple) else (one,)
    return [*compress(flat, map(is_, map(type, flat), repeat(Array)))]


def with_arrays(arguments: tuple[Any, ...], to: Callable[[Array], Any]) -> tuple[Any, ...]:
    """The arguments of a call with `to(array)` in the place of each array, also within named tuples."""
    return tuple(
        to(a) if isinstance(a, Array) else type(a)(*with_arrays(a, to)) if hasattr(a, "_fields") else a
        for a in arguments
    )


def _is_apart(axes: Iterable[tuple[int, int]]) -> bool:
    """Whether no items overlap: a step along each axis, (stride, length), leads beyond all items of the axes before
    it."""
    reach = 1
    for stride, length in axes:
        if length > 1:
            if stride < reach:
                return False
            reach += stride * (length - 1)
    return True


def aligned_up(size: int, alignment: int = 256) -> int:
    """`size` rounded up to a multiple of `alignment`, both in bytes."""
    return -(-size // alignment) * alignment
