"""The kinds of arrays the operations take, and the way of a test's NumPy arrays into each of them and back.

Strides and the memory around a view travel too: `put` moves the whole allocation behind a view, so that a test can
lay out gaps, poison them, and look at them afterwards.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
POISON = 0xFF  # NaN as bfloat16, float32, e4m3, e5m2 and e8m0; -1 as an integer


def gapped(values: np.ndarray, *gaps: int) -> np.ndarray:
    """A view of the same values in a larger, poisoned allocation with `gaps[i]` unused entries at the end of axis i."""
    gaps += (0,) * (values.ndim - len(gaps))
    whole = poisoned([n + g for n, g in zip(values.shape, gaps, strict=True)], values.dtype)
    view = whole[tuple(slice(n) for n in values.shape)]
    view[...] = values
    return view


def poisoned(shape: Any, dtype: Any) -> np.ndarray:
    """An array whose every byte is POISON."""
    array = np.empty(shape, dtype)
    allocation(array)[...] = POISON
    return array


def allocation(view: np.ndarray) -> np.ndarray:
    """All bytes of the allocation behind a view."""
    while isinstance(view.base, np.ndarray):
        view = view.base
    return view.reshape(-1).view(np.uint8)


class NumPy:
    name = "numpy"
    on_gpu = False

    def whole(self, raw: np.ndarray) -> Any:
        """Raw bytes as this kind's uint8 array."""
        return raw.copy()

    def view(self, whole: Any, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Any:
        """A view of an allocation; strides and start in bytes."""
        return np.ndarray(shape, dtype, whole, start, strides)

    def take(self, array: Any) -> np.ndarray:
        """The array's values as a NumPy array."""
        return array

    def is_mine(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def put_with_allocation(self, view: np.ndarray) -> tuple[Any, Any]:
        """A view of this kind with the same values and strides, and the allocation (uint8) behind it."""
        raw = allocation(view)
        start = view.__array_interface__["data"][0] - raw.__array_interface__["data"][0]
        whole = self.whole(raw if raw.size else np.empty(16, np.uint8))
        return self.view(whole, view.dtype, view.shape, view.strides, start if view.size else 0), whole

    def put(self, view: np.ndarray | None) -> Any:
        """The same values and strides in an array of this kind; None stays None."""
        return None if view is None else self.put_with_allocation(view)[0]


class CuPy(NumPy):
    name = "cupy"
    on_gpu = True

    def __init__(self) -> None:
        self.cupy = importlib.import_module("cupy")

    def whole(self, raw: np.ndarray) -> Any:
        return self.cupy.asarray(raw)

    def view(self, whole: Any, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Any:
        dtype = np.dtype(np.uint8) if dtype == E4M3 else dtype  # CuPy has no fp8; of e5m2 it keeps the dtype
        return self.cupy.ndarray(shape, dtype, whole.data + start, strides)

    def take(self, array: Any) -> np.ndarray:
        return array.view(np.uint8).get().view(E5M2) if array.dtype == E5M2 else array.get()

    def is_mine(self, array: Any) -> bool:
        return isinstance(array, self.cupy.ndarray)

    def stream(self) -> tuple[Any, Any]:
        """A new stream, and the context in which it is the current one."""
        stream = self.cupy.cuda.Stream(non_blocking=True)
        return stream, stream

    def on(self, device: int) -> Any:
        """The context in which a GPU is the current one."""
        return self.cupy.cuda.Device(device)

    def current(self) -> int:
        """The number of the current GPU."""
        return self.cupy.cuda.runtime.getDevice()

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        self.cupy.cuda.Device().synchronize()

    def keep_busy(self) -> None:
        """Tens of milliseconds of work on the current stream."""
        a = self.cupy.ones(2**28, np.float32)
        for _ in range(60):
            self.cupy.sin(a, out=a)


class Torch(NumPy):
    name = "torch"
    device = "cpu"

    def __init__(self) -> None:
        self.torch = torch = importlib.import_module("torch")
        names = ("bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64")
        self.dtypes = {np.dtype(n): getattr(torch, n) for n in names}
        self.dtypes |= {BF16: torch.bfloat16, E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}

    def whole(self, raw: np.ndarray) -> Any:
        return self.torch.from_numpy(raw.copy()).to(self.device)

    def view(self, whole: Any, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Any:
        size = dtype.itemsize
        return whole.view(self.dtypes[dtype]).as_strided(shape, [s // size for s in strides], start // size)

    def take(self, array: Any) -> np.ndarray:
        array = array.detach().cpu().contiguous()
        dtype = next(n for n, t in self.dtypes.items() if t == array.dtype)
        integers = {1: self.torch.uint8, 2: self.torch.int16}.get(dtype.itemsize, array.dtype)
        return array.view(integers).numpy().view(dtype)

    def is_mine(self, array: Any) -> bool:
        return isinstance(array, self.torch.Tensor) and array.device.type == self.device


class TorchCUDA(Torch):
    name = "torch_cuda"
    on_gpu = True
    device = "cuda"

    def stream(self) -> tuple[Any, Any]:
        stream = self.torch.cuda.Stream()
        return stream, self.torch.cuda.stream(stream)

    def on(self, device: int) -> Any:
        return self.torch.cuda.device(device)

    def current(self) -> int:
        return self.torch.cuda.current_device()

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def _bytes(self, x: Any) -> Any:
        return x.flatten().view(self.torch.uint8)

    def check_bits_on_any_stream(self, call: Callable[[], Iterable[Any]], runs: int = 100) -> None:
        """So many calls, those of five streams beside one another, give the same bits."""
        want = [x for x in call() if x is not None]
        self.synchronize()
        streams = [self.torch.cuda.Stream() for _ in range(5)]
        different = []
        for run in range(runs):
            with self.torch.cuda.stream(streams[run % 5]):
                got = [x for x in call() if x is not None]
                pairs = zip(got, want, strict=True)
                different += [(self._bytes(x) != self._bytes(y)).any() for x, y in pairs]
        self.synchronize()
        assert len(different) == runs * len(want)
        assert not any(map(bool, different))

    def keep_busy(self) -> None:
        a = self.torch.ones(2**28, device=self.device)
        for _ in range(60):
            a.sin_()


KINDS = {cls.name: cls for cls in (NumPy, Torch, CuPy, TorchCUDA)}


def installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def make(name: str) -> NumPy:
    """The kind called `name`; skips the test where its library is missing or has no CUDA."""
    library = name.removesuffix("_cuda")
    if not installed(library):
        pytest.skip(f"{library} is not installed")
    made = KINDS[name]()
    if name == "torch_cuda" and not made.torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return made
