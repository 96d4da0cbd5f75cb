"""Uses of private names of other libraries. Each has a fallback with public names, for versions without the private
one.

With public names alone a call would exceed its budget of host time (docs/host_time.md). Microseconds on an H200's host
with the private and the public name: a variable of the environment 0.04 and 0.57, torch's current stream 0.06 and 1.43,
a tensor 1.1 and 2.3, a CuPy array 1.3 and 1.8.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np


def environment_reader(name: str) -> Callable[[], str | None]:
    """A function that reads a variable of the environment; None: it is not set."""
    try:
        data, key = os.environ._data, os.environ.encodekey(name)  # type: ignore[attr-defined]
        decode = os.environ.decodevalue
    except AttributeError:
        return public_environment_reader(name)

    def read() -> str | None:
        value = data.get(key)
        return None if value is None else decode(value)

    return read


def public_environment_reader(name: str) -> Callable[[], str | None]:
    """`environment_reader` with public names."""
    return partial(os.environ.get, name)


def environment_snapshots(*names: str) -> Callable[[], tuple[str | bytes | None, ...]]:
    """A function that reads two variables of the environment, to compare them with earlier values. They may be
    encoded."""
    try:
        get, (first, second) = os.environ._data.get, map(os.environ.encodekey, names)  # type: ignore[attr-defined]
    except AttributeError:
        return public_environment_snapshots(*names)
    return lambda: (get(first), get(second))  # takes half the time of `map`


def public_environment_snapshots(*names: str) -> Callable[[], tuple[str | None, ...]]:
    """`environment_snapshots` with public names."""
    return lambda: tuple(map(os.environ.get, names))


def torch_stream_reader(device: int) -> Callable[[], int]:
    """A function that returns the handle of torch's current stream of a GPU."""
    current = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None)
    return public_torch_stream_reader(device) if current is None else partial(current, device)


def public_torch_stream_reader(device: int) -> Callable[[], int]:
    """`torch_stream_reader` with public names."""
    current = sys.modules["torch"].cuda.current_stream
    return lambda: current(device).cuda_stream


def torch_device_reader() -> Callable[[], int]:
    """A function that returns the number of torch's current GPU."""
    torch = sys.modules["torch"]
    return getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def torch_guards(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """A function that tells whether other tensors have the classes, dtypes, devices, shapes, strides and
    `requires_grad` of these.

    It is a guard of torch.compile, which compares all tensors in one call. None if this torch has no such guards, a
    tensor has no sizes or strides (nested and sparse ones), or a tensor occurs twice, which the guards never let pass.
    Then the caller reads and compares each tensor.
    """
    if len({*map(id, tensors)}) < len(tensors):
        return None
    try:
        guards = sys.modules["torch"]._C._dynamo.guards.TensorGuards
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (AttributeError, TypeError, RuntimeError):
        return None


def torch_empty() -> Callable[[tuple[int, ...], tuple[int, ...], Any], Any]:
    """A function that makes an uninitialised tensor of a shape, strides and dtype on the current GPU."""
    try:
        return sys.modules["torch"]._C._dynamo.guards._empty_strided_cuda
    except AttributeError:
        return public_torch_empty()


def public_torch_empty() -> Callable[[tuple[int, ...], tuple[int, ...], Any], Any]:
    """`torch_empty` with public names."""
    empty_strided = sys.modules["torch"].empty_strided
    return lambda shape, strides, dtype: empty_strided(shape, strides, dtype=dtype, device="cuda")


def cupy_empty() -> Callable[[tuple[int, ...], Any, Any], Any]:
    """A function that makes an uninitialised CuPy array of a shape and dtype, in given or new memory of the current
    GPU."""
    ndarray = sys.modules["cupy"].ndarray
    (base,) = ndarray.__bases__
    if not hasattr(base, "_init"):
        return public_cupy_empty()
    new = base.__new__

    def make(shape: tuple[int, ...], dtype: Any, memory: Any = None) -> Any:
        array = new(ndarray)
        array._init(shape, dtype, memory, None, None)  # no strides; no order means C, and needs no parsing
        return array

    return make


def public_cupy_empty() -> Callable[[tuple[int, ...], Any, Any], Any]:
    """`cupy_empty` with public names."""
    ndarray = sys.modules["cupy"].ndarray

    def make(shape: tuple[int, ...], dtype: Any, memory: Any = None) -> Any:
        return ndarray(shape, np.dtype(dtype), memory)

    return make
