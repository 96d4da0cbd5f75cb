"""The only module that knows NumPy, CuPy and torch apart.

Two things live here. The *bridges* (`to_numpy`, `to_cupy`, `to_torch`) hand an array from one library to
another through DLPack. The *descriptors* serve the hot path, where DLPack is too slow: `bind` looks at the
arguments of one call, makes sure they are of one kind on one device, and describes each as an `Array`
(pointer, shape, strides, dtype) next to the `Place` they live in, which allocates outputs in the caller's kind
of array and knows the caller's current stream.

Neither CuPy nor torch is imported here unless the caller's arrays are theirs or a bridge to them is asked for.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from .layouts import BFLOAT16, E4M3, E8M0
from .recording import recording

HOST = -1  # the device number of host memory

# Index ranges are checked only when asked: it reads them back, so it synchronises.
CHECK_VALUES = os.environ.get("CUPY_MLA_CHECK", "0") == "1"

_NARROW: dict[np.dtype, np.dtype] = {BFLOAT16: np.dtype(np.int16), E4M3: np.dtype(np.uint8), E8M0: np.dtype(np.uint8)}


# --- what the libraries call things ---------------------------------------------------------------------------


@cache
def _torch_dtypes() -> tuple[dict[Any, np.dtype], dict[np.dtype, Any]]:
    torch = sys.modules["torch"]
    names = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
    known = {getattr(torch, n): np.dtype(n) for n in names}
    known[torch.bfloat16] = BFLOAT16
    known[torch.float8_e4m3fn] = E4M3
    if hasattr(torch, "float8_e8m0fnu"):
        known[torch.float8_e8m0fnu] = E8M0
    return known, {v: k for k, v in known.items()}


def as_dtype(dtype: Any) -> np.dtype:
    """NumPy's dtype for one of NumPy's, CuPy's or torch's."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return _torch_dtypes()[0][dtype]
    return np.dtype(dtype)


def kind_of(array: Any) -> str:
    """The library `array` belongs to: "numpy", "cupy" or "torch".

    Raises:
        TypeError: it belongs to none of them.
    """
    if isinstance(array, np.ndarray):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return "cupy"
    raise TypeError(f"expected a NumPy, CuPy or torch array, got {type(array).__module__}.{type(array).__qualname__}")


def require_cupy(why: str) -> ModuleType:
    """CuPy with a working GPU behind it.

    Raises:
        RuntimeError: one sentence on what is missing and what to install.
    """
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise RuntimeError(
            f"{why} needs CuPy: pip install 'cupy_mla[cuda12]' (CUDA 12 driver) or 'cupy_mla[cuda13]' (CUDA 13 driver)"
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"{why} needs an NVIDIA GPU with a driver for CUDA 12 or later: {error}") from error
    if count == 0:
        raise RuntimeError(f"{why} needs an NVIDIA GPU, and the driver sees none")
    return cupy


def cuda_available() -> bool:
    """True when CuPy is installed and sees a GPU."""
    try:
        require_cupy("this check")
    except RuntimeError:
        return False
    return True


# --- descriptors ----------------------------------------------------------------------------------------------


class Array:
    """What one call knows of one argument: where it lies and how. Strides count items, not bytes."""

    __slots__ = ("_dropped", "device", "dtype", "kind", "name", "obj", "ptr", "shape", "strides")
    ptr: int

    def __init__(self, name: str, obj: Any) -> None:
        try:
            self.kind = kind = kind_of(obj)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        self.name = name
        self.obj = obj
        self._dropped: int | None = None
        if kind == "torch":
            self._describe_tensor(obj)
        else:
            self._describe_array(obj)
        record = recording()
        if record is not None:
            self.ptr = record.pointer(name, obj, self.ptr)

    def _describe_tensor(self, obj: Any) -> None:
        try:
            self.dtype = _torch_dtypes()[0][obj.dtype]
        except KeyError:
            raise TypeError(f"{self.name}: dtype {obj.dtype} is not supported") from None
        if obj.layout is not sys.modules["torch"].strided:
            raise TypeError(f"{self.name}: expected a dense tensor, got layout {obj.layout}")
        self.shape = tuple(obj.shape)
        self.strides = obj.stride()
        self.ptr = obj.data_ptr()
        device = obj.device
        if device.type == "cpu":
            self.device = HOST
        elif device.type == "cuda":
            self.device = device.index
        else:
            raise TypeError(f"{self.name}: expected a CPU or CUDA tensor, got device {device}")

    def _describe_array(self, obj: Any) -> None:
        self.dtype = dtype = obj.dtype
        if not dtype.isnative:
            raise TypeError(f"{self.name}: expected native byte order, got dtype {dtype.str}")
        self.shape = obj.shape
        size = dtype.itemsize
        if any(s % size for s in obj.strides):
            raise ValueError(f"{self.name}: strides {obj.strides} bytes are no multiples of the item size {size}")
        self.strides = tuple(s // size for s in obj.strides)
        if self.kind == "cupy":
            self.ptr = obj.data.ptr
            self.device = obj.data.device_id
        else:
            self.ptr = obj.__array_interface__["data"][0]
            self.device = HOST

    def __repr__(self) -> str:
        return f"Array({self.name}: {self.dtype.name}{list(self.shape)}, strides {list(self.strides)}, {self.kind})"

    def require(
        self, dtype: np.dtype | tuple[np.dtype, ...], *shape: int | str | tuple[int, ...], contiguous: bool = True
    ) -> Array:
        """Check dtype, shape and (unless `contiguous` is False) the contiguous last axis; returns itself.

        A shape entry is a length, several allowed lengths, or a name for a length that may be anything.

        Raises:
            TypeError: wrong dtype. ValueError: wrong shape or a last axis with gaps. Both name the argument.
        """
        if self.dtype != dtype and not (isinstance(dtype, tuple) and self.dtype in dtype):
            wanted = " or ".join(d.name for d in dtype) if isinstance(dtype, tuple) else np.dtype(dtype).name
            raise TypeError(f"{self.name}: expected dtype {wanted}, got {self.dtype.name}")
        fits = len(shape) == len(self.shape) and all(
            isinstance(want, str) or got == want or (isinstance(want, tuple) and got in want)
            for want, got in zip(shape, self.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join(" or ".join(map(str, w)) if isinstance(w, tuple) else str(w) for w in shape)
            raise ValueError(f"{self.name}: expected shape [{wanted}], got {list(self.shape)}")
        gaps = self.strides and self.strides[-1] != 1 and self.shape[-1] > 1 and 0 not in self.shape
        if contiguous and gaps:
            raise ValueError(
                f"{self.name}: the last axis must be contiguous, got strides {list(self.strides)} (in items)"
            )
        return self

    def require_writable(self) -> Array:
        """Check that a result can be written here: no read-only memory, no two items in one place; returns itself."""
        if self.kind == "numpy" and not self.obj.flags.writeable:
            raise ValueError(f"{self.name}: expected a writable array, got a read-only one")
        if 0 in self.shape:
            return self
        reach = 1
        for stride, length in sorted((abs(s), n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if stride < reach:
                raise ValueError(
                    f"{self.name}: items overlap in memory (strides {list(self.strides)}), nothing can be written"
                )
            reach = stride * (length - 1) + reach
        return self

    def require_no_gradient(self) -> Array:
        """Check that autograd does not follow this array: there is no backward; returns itself."""
        if self.kind == "torch" and self.obj.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise RuntimeError(
                f"{self.name} requires a gradient, and cupy_mla has no backward: "
                "call under torch.no_grad(), or detach it"
            )
        return self

    def without_axis(self, axis: int) -> Array:
        """Drop an axis of length 1 (the single KV head) from the description; returns itself."""
        if self.shape[axis] != 1:
            raise ValueError(f"{self.name}: axis {axis} (KV heads) must have length 1, got shape {list(self.shape)}")
        self.shape = self.shape[:axis] + self.shape[axis + 1 :]
        self.strides = self.strides[:axis] + self.strides[axis + 1 :]
        self._dropped = axis
        return self

    def aligned(self, nbytes: int) -> bool:
        """True when the first item of every row along the last axis starts at a multiple of `nbytes`."""
        size = self.dtype.itemsize
        return self.ptr % nbytes == 0 and all(
            s * size % nbytes == 0 for s, n in zip(self.strides[:-1], self.shape[:-1], strict=True) if n > 1
        )

    def numpy(self) -> np.ndarray:
        """The same host memory as a NumPy array, no copy."""
        view = _host_view(self.obj, self.kind, self.dtype)
        return view if self._dropped is None else view.squeeze(self._dropped)


def _host_view(obj: Any, kind: str, dtype: np.dtype) -> np.ndarray:
    if kind == "numpy":
        return obj
    obj = obj.detach()
    narrow = _NARROW.get(dtype)
    if narrow is None:
        return obj.numpy()
    return obj.view(_torch_dtypes()[1][narrow]).numpy().view(dtype)


class Place(NamedTuple):
    """Where the arrays of one call live: the library that owns them and the device (`HOST` or a CUDA number)."""

    kind: str
    device: int

    @property
    def on_gpu(self) -> bool:
        return self.device != HOST

    @classmethod
    def of(cls, array: Any) -> Place:
        """Where `array` lives."""
        a = Array("array", array)
        return cls(a.kind, a.device)

    def admit(self, array: Array) -> Array:
        """Check that an argument lives here, too; returns it.

        Raises:
            TypeError: another library's array. ValueError: another device. Both name the argument.
        """
        if array.kind != self.kind:
            raise TypeError(f"{array.name}: expected a {self.kind} array as the others are, got a {array.kind} one")
        if array.device != self.device:
            here, there = _device_name(self.device), _device_name(array.device)
            raise ValueError(f"{array.name}: expected it on {here} as the others are, got {there}")
        return array

    def optional(self, **arguments: Any) -> list[Array | None]:
        """Describe the arguments that a call may leave out, as `bind` does the others; None stays None."""
        return [None if value is None else self.admit(Array(name, value)) for name, value in arguments.items()]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A new uninitialised array of the caller's kind, on the caller's device and stream; fp8 as uint8 in CuPy."""
        make = self._maker(shape, dtype)
        if self.on_gpu:
            with self.current():
                array = make()
        else:
            array = make()
        record = recording()
        if record is not None:
            record.allocated(array, make)
        return array

    def _maker(self, shape: tuple[int, ...], dtype: np.dtype) -> Callable[..., Any]:
        """Makes such arrays while this device is the current one; given CuPy's memory, in it."""
        if self.kind == "numpy":
            return partial(np.empty, shape, dtype)
        if self.kind == "cupy":
            return _cupy_maker(shape, np.dtype(np.uint8) if dtype == E4M3 else dtype)
        torch = sys.modules["torch"]
        torch_dtype = _torch_dtypes()[1][np.dtype(dtype)]
        if self.device == HOST:
            return partial(torch.empty, shape, dtype=torch_dtype, device="cpu")
        strides = tuple(math.prod(max(n, 1) for n in shape[axis + 1 :]) for axis in range(len(shape)))
        # What compiled graphs allocate with: a third of the time of torch.empty, on the current device.
        return partial(torch._C._dynamo.guards._empty_strided_cuda, shape, strides, torch_dtype)

    @property
    def address(self) -> str:
        """What to write behind an array on this GPU to read where it starts."""
        return ".data_ptr()" if self.kind == "torch" else ".data.ptr"

    @property
    def parts_are_cheap(self) -> bool:
        """Whether arrays in parts of one piece of memory cost the host less than arrays with their own."""
        return self.kind == "cupy"

    def memory(self, nbytes: int) -> tuple[Callable[[], Any], str]:
        """Makes memory on this GPU for a while, and what to write behind it to read where it starts."""
        if self.kind == "torch":
            return self._maker((nbytes,), np.dtype(np.uint8)), self.address
        return partial(sys.modules["cupy"].cuda.alloc, nbytes), ".ptr"

    def carve(self, whole: Any, start: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A view of the bytes from `start` on of a uint8 array of this place, as an array of its own."""
        part = whole[start : start + math.prod(shape) * np.dtype(dtype).itemsize]
        as_dtype = _torch_dtypes()[1][np.dtype(dtype)] if self.kind == "torch" else dtype
        return part.view(as_dtype).reshape(shape)

    def output(self, name: str, given: Array | None, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """The caller's output array, checked, or a new one where none was given."""
        if given is None:
            return Array(name, self.empty(shape, dtype))
        return given.require(dtype, *shape).require_writable()

    def call(self, launcher: Callable[..., None], reference: Callable[..., None], *arguments: Any) -> None:
        """Hand checked arguments to one of the two twins: the CUDA launcher or the NumPy reference.

        Both take the same arguments in the same order. The launcher gets the place first and descriptors, the
        reference gets NumPy views of the same memory.

        Raises:
            RuntimeError: a tensor wants a gradient, which neither twin can give.
        """
        for a in arguments:
            if isinstance(a, Array):
                a.require_no_gradient()
        if self.on_gpu:
            record = recording()
            if record is not None:
                record.place = self
            launcher(self, *arguments)
        else:
            reference(*(a.numpy() if isinstance(a, Array) else a for a in arguments))

    def current(self) -> AbstractContextManager[Any]:
        """Makes this GPU the current device for a while."""
        if self.kind == "torch":
            return sys.modules["torch"].cuda.device(self.device)
        return sys.modules["cupy"].cuda.Device(self.device)

    def stream(self) -> int:
        """Handle of the caller's current CUDA stream: torch's for torch tensors, CuPy's for CuPy arrays."""
        current, _ = self.streams
        return current() if self.kind == "torch" else current().ptr

    @property
    def streams(self) -> tuple[Callable[[], Any], str]:
        """Tells, at any time, the caller's current CUDA stream, and what to write behind it to read its handle."""
        if self.kind == "torch":
            return partial(sys.modules["torch"]._C._cuda_getCurrentRawStream, self.device), ""
        return partial(sys.modules["cupy"].cuda.get_current_stream, self.device), ".ptr"


def _cupy_maker(shape: tuple[int, ...], dtype: np.dtype) -> Callable[..., Any]:
    """Makes such CuPy arrays as cupy.ndarray(shape, dtype) does, without the detours that take it a third longer."""
    ndarray = sys.modules["cupy"].ndarray
    (base,) = ndarray.__bases__
    name = dtype.char if dtype.isbuiltin == 1 else dtype  # the character is found faster

    def make(memory: Any = None) -> Any:
        array = base.__new__(ndarray)
        array._init(shape, name, memory, None, None)  # no strides, and no order, which would be parsed: C
        return array

    return make


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
        self._whole = place.empty((size,), np.dtype(np.uint8))
        self._whole[...] = 0
        self.arrays = {name: place.carve(self._whole, *field) for name, field in self._fields.items()}
        self._staging = [_Staging(place.device, size) for _ in range(2)] if place.on_gpu else []

    def upload(self, write: Callable[[dict[str, np.ndarray]], int]) -> None:
        """Rewrite the arrays.

        Args:
            write: fills the host's copies of the arrays, whose old contents are arbitrary, and returns how many rows
                of the last one are to go up; all others go up whole.
        """
        if not self.place.on_gpu:
            write({name: Array(name, array).numpy() for name, array in self.arrays.items()})
            return
        whole = Array("whole", self._whole)
        staging = next((s for s in self._staging if s.free()), None)
        if staging is None:
            staging = _Staging(self.place.device, whole.shape[0])
            self._staging.append(staging)
        host = Place("numpy", HOST)
        rows = write({name: host.carve(staging.bytes, *field) for name, field in self._fields.items()})
        last = list(self._fields.values())[-1]
        size = last.start + rows * math.prod(last.shape[1:]) * last.dtype.itemsize
        staging.copy(whole.ptr, size, self.place.stream())


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


def aligned_up(size: int, alignment: int = 256) -> int:
    """`size` rounded up to a multiple of `alignment`, both in bytes."""
    return -(-size // alignment) * alignment


def bind(**arguments: Any) -> tuple[Place, list[Array]]:
    """Describe the array arguments that one call must have; `Place.optional` describes the others.

    Returns:
        the place all of them live in, and a descriptor for each, in the order given.

    Raises:
        TypeError: something is no array, or kinds are mixed.
        ValueError: devices are mixed. Both name the argument.
    """
    described = [Array(name, value) for name, value in arguments.items()]
    place = Place(described[0].kind, described[0].device)
    return place, [place.admit(a) for a in described]


def _device_name(device: int) -> str:
    return "the CPU" if device == HOST else f"cuda:{device}"


# --- bridges --------------------------------------------------------------------------------------------------


def to_numpy(array: Any) -> np.ndarray:
    """`array` as NumPy: the same memory when it is on the host, a copy when it is on a GPU (synchronises)."""
    a = Array("array", array)
    if a.device == HOST:
        return a.numpy()
    if a.kind == "torch":
        return _host_view(array.detach().cpu(), "torch", a.dtype)
    return array.get()


def to_cupy(array: Any) -> Any:
    """`array` as CuPy: the same memory when it is on a GPU (DLPack), a copy when it is on the host.

    bfloat16 stays bfloat16; fp8 comes as uint8, since CuPy has no fp8 type.

    Raises:
        RuntimeError: CuPy or a GPU is missing.
    """
    cupy = require_cupy("to_cupy")
    a = Array("array", array)
    if a.kind == "cupy":
        return array
    narrow = _NARROW.get(a.dtype, a.dtype)
    if a.device == HOST:
        moved = cupy.asarray(a.numpy().view(narrow))
    else:
        moved = cupy.from_dlpack(array.detach().view(_torch_dtypes()[1][narrow]))
    return moved.view(BFLOAT16) if a.dtype == BFLOAT16 else moved


def to_torch(array: Any, dtype: Any = None) -> Any:
    """`array` as a torch tensor over the same memory, on the host or on a GPU (DLPack).

    Args:
        dtype: a torch dtype of the same item size to view the result as (e.g. `torch.float8_e4m3fn` for uint8).

    Raises:
        RuntimeError: torch is missing. ValueError: a stride is negative, which torch cannot hold.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise RuntimeError("to_torch needs torch: pip install torch") from error
    a = Array("array", array)
    if a.kind == "torch":
        moved = array
    elif any(stride < 0 for stride in a.strides):  # torch's DLPack import ends the process over one
        raise ValueError(f"array: torch has no negative strides, got {list(a.strides)} (in items)")
    else:
        narrow = _NARROW.get(a.dtype, a.dtype)
        plain = array.view(narrow) if narrow != a.dtype else array
        moved = torch.from_dlpack(plain).view(_torch_dtypes()[1][a.dtype])
    return moved if dtype is None else moved.view(dtype)
