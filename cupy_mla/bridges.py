"""The only module that knows NumPy, CuPy and torch apart.

- The *bridges* `to_numpy`, `to_cupy` and `to_torch` hand an array from one library to another through DLPack.
- A `Library` does what the package needs of one of the three: describe an array, allocate one, find the caller's
  current stream.
- A `Place` is a library and a device. `bind` checks that the arguments of a call are all in one place, and describes
  each as an `Array`.

CuPy and torch are imported only if the caller's arrays are theirs, or a bridge to them is called.
"""

from __future__ import annotations

import importlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from itertools import accumulate, repeat
from operator import attrgetter, floordiv, is_not, mod, mul
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import private
from .arrays import HOST, Array, aligned_up, arrays_in, with_arrays
from .checks.options import require_choice, require_integer, shown
from .dtypes import BFLOAT16, E4M3, E5M2, E8M0, UINT8
from .typing import AnyArray, LibraryName

if TYPE_CHECKING:
    import torch

# Dtypes under which torch and CuPy hand over, as plain integers, what one of the libraries does not know.
_NARROW: dict[np.dtype, np.dtype] = {
    BFLOAT16: np.dtype(np.int16),
    E4M3: UINT8,
    E5M2: UINT8,
    E8M0: UINT8,
}


Shape = tuple[int, ...]
Comparison = Callable[[Sequence[Any]], list[int] | None]  # of `Library.comparison`


# Made once: to look up the libraries' functions takes longer than to call them.
_cupy_maker, _torch_maker = cache(private.cupy_empty), cache(private.torch_empty)
_torch_stream_reader, _torch_device_reader = cache(private.torch_stream_reader), cache(private.torch_device_reader)

# Attributes that are read of many arrays by `map`: no Python function is called for each.
_NAME, _PLACE, _WRITTEN = map(attrgetter, ("name", "place", "written"))
_DTYPE, _SHAPE, _STRIDES = map(attrgetter, ("dtype", "shape", "strides"))
_TORCH_KIND, _REQUIRES_GRAD = attrgetter("dtype", "device", "layout"), attrgetter("requires_grad")
_CUPY_FACTS = attrgetter("dtype", "data.device_id", "shape", "strides")
_CUPY_DEVICE, _CUPY_ADDRESS = attrgetter("data.device_id"), attrgetter("data.ptr")


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in items, of an array of this shape without gaps in C order."""
    return tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1] if shape else ()


# --- the libraries --------------------------------------------------------------------------------------------


class Library(ABC):
    """What the package needs of NumPy, CuPy or torch.

    Attributes:
        name: "numpy", "cupy" or "torch".
    """

    name: str

    @abstractmethod
    def describe(self, name: str, obj: Any) -> Array:
        """The description of an array of this library."""

    def described(
        self, names: Sequence[str], arrays: Sequence[Any], facts: tuple[Any, ...], place: Place, pointers: Iterable[Any]
    ) -> list[Array] | None:
        """The descriptions of a call's arrays on a GPU, made of their `facts`. None if `describe` must do it, which may
        raise an error.

        Args:
            place, pointers: the place and the addresses of the descriptions.
        """
        return None

    def facts(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """What a call depends on of its arrays on a GPU, beside their classes and addresses: a part of its key.

        Raises:
            RuntimeError: an array has no strides, for instance a sparse tensor.
        """
        raise self._no_gpu()

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        """The addresses of arrays on a GPU.

        Raises:
            RuntimeError: an array has no memory of its own.
        """
        raise self._no_gpu()

    def comparison(self, arrays: Sequence[Any], alignment: int) -> Comparison | None:
        """A function that compares the arrays of other calls with these.

        It returns their addresses, if they have the same classes and facts, and all addresses are multiples of
        `alignment`, a power of two; else None. There is no such function (None) where it would not be faster than to
        compare keys.
        """
        return None

    @abstractmethod
    def device_of(self, obj: Any) -> int | None:
        """The number of an array's device; None where the package cannot use it."""

    def on_gpu(self, obj: Any) -> bool:
        """Whether an array lies on a GPU."""
        return self.device_of(obj) not in (HOST, None)

    def writable(self, obj: Any) -> bool:
        """Whether the array may be written."""
        return True

    def wants_gradient(self, obj: Any) -> bool:
        """Whether autograd follows the array."""
        return False

    def host_view(self, obj: Any, dtype: np.dtype) -> np.ndarray:
        """The same host memory as a NumPy array."""
        raise TypeError(f"{self.name} arrays do not lie in host memory")

    @abstractmethod
    def empty(self, device: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A new uninitialised array; e4m3 as uint8 in CuPy."""

    def gpus(self) -> int:
        """How many GPUs the library sees."""
        return 0

    @abstractmethod
    def widened(self, obj: Any) -> Any:
        """The numbers of an array of e4m3, or of its bytes, as float32: a new array."""

    @abstractmethod
    def rounded(self, obj: Any) -> Any:
        """A float32 array in bfloat16: a new array."""

    @abstractmethod
    def repeated(self, obj: Any, times: int, axis: int) -> Any:
        """Each item so many times along an axis: a new array."""

    def native_dtype(self, dtype: np.dtype) -> Any:
        """The library's own dtype for one of NumPy's."""
        return dtype

    def to_device(self, device: int) -> AbstractContextManager[Any]:
        """A context in which a GPU is the current device."""
        raise self._no_gpu()

    def device_reader(self) -> Callable[[], int]:
        """A function that returns the number of the GPU on which the library now makes arrays. torch's may be another
        than CUDA's current one: torch does not go back to a GPU that it has not used yet."""
        raise self._no_gpu()

    def stream_reader(self, device: int) -> Callable[[], int]:
        """A function that returns the handle of the caller's current stream of a GPU."""
        raise self._no_gpu()

    def maker(self) -> Callable[..., Any]:
        """A function that makes arrays on the current GPU: torch's of shape, strides and native dtype; CuPy's of shape,
        native dtype and, if given, memory."""
        raise self._no_gpu()

    def result_maker(self, results: Sequence[Array]) -> Callable[[], tuple[list[Any], list[int]]]:
        """A function that allocates results of these descriptions on the current GPU. It returns them and their
        addresses."""
        raise self._no_gpu()

    def scratch_allocator(self) -> Callable[[int], tuple[int, Any]]:
        """A function that allocates bytes on the current GPU; it returns the address, and the owner of the memory."""
        raise self._no_gpu()

    def _no_gpu(self) -> TypeError:
        return TypeError(f"{self.name} arrays do not lie on a GPU")


class NumPyLibrary(Library):
    """NumPy: host memory."""

    name = "numpy"

    def device_of(self, obj: Any) -> int | None:
        return HOST

    def describe(self, name: str, obj: Any) -> Array:
        if isinstance(obj, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected an array without a mask, got a masked one, whose mask nothing looks at")
        return _described_by_bytes(name, obj, place_at("numpy", HOST), obj.__array_interface__["data"][0])

    def writable(self, obj: Any) -> bool:
        return obj.flags.writeable

    def host_view(self, obj: Any, dtype: np.dtype) -> np.ndarray:
        return np.asarray(obj)  # subclasses such as np.matrix behave differently

    def widened(self, obj: Any) -> Any:
        return obj.view(E4M3).astype(np.float32)

    def rounded(self, obj: Any) -> Any:
        return obj.astype(BFLOAT16)

    def repeated(self, obj: Any, times: int, axis: int) -> Any:
        return obj.repeat(times, axis)

    def empty(self, device: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return np.empty(shape, dtype)


class CuPyLibrary(Library):
    """CuPy: memory of a GPU."""

    name = "cupy"

    def facts(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(_CUPY_FACTS, arrays))

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        return [*map(_CUPY_ADDRESS, arrays)]

    def comparison(self, arrays: Sequence[Any], alignment: int) -> Comparison:
        facts = [*map(_CUPY_FACTS, arrays)]

        def addresses_of(arrays: Sequence[Any]) -> list[int] | None:
            addresses = []
            for array, fact in zip(arrays, facts, strict=True):
                data = array.data
                address = data.ptr
                if address % alignment or (array.dtype, data.device_id, array.shape, array.strides) != fact:
                    return None
                addresses.append(address)
            return addresses

        return addresses_of

    def device_of(self, obj: Any) -> int | None:
        return obj.data.device_id

    def described(
        self, names: Sequence[str], arrays: Sequence[Any], facts: tuple[Any, ...], place: Place, pointers: Iterable[Any]
    ) -> list[Array] | None:
        if len({*map(_CUPY_DEVICE, arrays)}) > 1:
            return None
        return [*map(_described_by_bytes, names, arrays, repeat(place), pointers)]

    def describe(self, name: str, obj: Any) -> Array:
        return _described_by_bytes(name, obj, place_at("cupy", obj.data.device_id), obj.data.ptr)

    def empty(self, device: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        with self.to_device(device):
            return self.maker()(shape, self.native_dtype(np.dtype(dtype)))

    def gpus(self) -> int:
        return sys.modules["cupy"].cuda.runtime.getDeviceCount()

    def widened(self, obj: Any) -> Any:
        with self.to_device(obj.data.device_id):  # CuPy has no fp8: a table has the number of each byte
            return sys.modules["cupy"].asarray(np.arange(256, dtype=UINT8).view(E4M3).astype(np.float32))[obj]

    def rounded(self, obj: Any) -> Any:
        return obj.astype(BFLOAT16)

    def repeated(self, obj: Any, times: int, axis: int) -> Any:
        return obj.repeat(times, axis)

    def native_dtype(self, dtype: np.dtype) -> Any:
        dtype = UINT8 if dtype == E4M3 else dtype
        return dtype.char if dtype.isbuiltin == 1 else dtype  # CuPy finds a dtype faster by its character

    def to_device(self, device: int) -> AbstractContextManager[Any]:
        return sys.modules["cupy"].cuda.Device(device)

    def device_reader(self) -> Callable[[], int]:
        return sys.modules["cupy"].cuda.runtime.getDevice

    def stream_reader(self, device: int) -> Callable[[], int]:
        current = sys.modules["cupy"].cuda.get_current_stream
        return lambda: current(device).ptr

    def maker(self) -> Callable[..., Any]:
        return _cupy_maker()

    def result_maker(self, results: Sequence[Array]) -> Callable[[], tuple[list[Any], list[int]]]:
        """All results share one allocation, which takes less host time than one for each."""
        allocate, make = sys.modules["cupy"].cuda.alloc, self.maker()
        made: list[tuple[Shape, Any, int]] = []
        end = 0
        for array in results:
            start = aligned_up(end)
            made.append((array.shape, self.native_dtype(array.dtype), start))
            end = start + math.prod(array.shape) * array.dtype.itemsize

        def make_results() -> tuple[list[Any], list[int]]:
            memory = allocate(end)
            address = memory.ptr
            results = [make(shape, dtype, memory + start) for shape, dtype, start in made]
            return results, [address + start for _, _, start in made]

        return make_results

    def scratch_allocator(self) -> Callable[[int], tuple[int, Any]]:
        allocate = sys.modules["cupy"].cuda.alloc

        def scratch(nbytes: int) -> tuple[int, Any]:
            memory = allocate(nbytes)
            return memory.ptr, memory

        return scratch


class TorchLibrary(Library):
    """torch: host memory or that of a GPU."""

    name = "torch"

    def facts(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        torch = sys.modules["torch"]
        tensor, required = torch.Tensor, tuple(map(_REQUIRES_GRAD, arrays))
        gradients = required if True in required and torch.is_grad_enabled() else ()
        odd = *map(tensor.is_neg, arrays), *map(tensor.is_conj, arrays), *gradients
        return tuple(map(_TORCH_KIND, arrays)), tuple(map(_SHAPE, arrays)), tuple(map(tensor.stride, arrays)), odd

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        return [*map(sys.modules["torch"].Tensor.data_ptr, arrays)]

    def described(
        self, names: Sequence[str], arrays: Sequence[Any], facts: tuple[Any, ...], place: Place, pointers: Iterable[Any]
    ) -> list[Array] | None:
        kinds, shapes, strides, odd = facts
        dtypes = _plain_dtypes(kinds)
        if dtypes is None or True in odd:
            return None
        return [*map(Array, names, arrays, repeat(place), dtypes, map(tuple, shapes), strides, pointers)]

    def describe(self, name: str, obj: Any) -> Array:
        dtype = _torch_dtypes()[0].get(obj.dtype)
        if dtype is None:
            raise TypeError(f"{name}: dtype {obj.dtype} is not supported")
        if obj.is_nested or obj.layout is not sys.modules["torch"].strided:
            what = "a nested one" if obj.is_nested else f"layout {obj.layout}"
            raise TypeError(f"{name}: expected a dense tensor, got {what}")
        if obj.is_neg() or obj.is_conj():
            raise TypeError(f"{name}: its memory holds other values: call resolve_neg() and resolve_conj() before")
        device = self.device_of(obj)
        if device is None:
            raise TypeError(f"{name}: expected a CPU or CUDA tensor, got device {obj.device}")
        try:
            ptr = obj.data_ptr()
        except RuntimeError:  # under vmap
            raise TypeError(
                f"{name}: expected a tensor with memory of its own, got {type(obj).__name__} without, "
                "as torch.vmap has it"
            ) from None
        if ptr == 0 and obj.numel():  # fake tensors outside of torch.compile
            raise TypeError(f"{name}: expected a tensor with memory of its own, got {type(obj).__name__} without")
        array = Array(name, obj, place_at("torch", device), dtype, tuple(obj.shape), obj.stride(), ptr)
        if obj.requires_grad:
            array.wants_gradient = self.wants_gradient(obj)
        return array

    def comparison(self, arrays: Sequence[Any], alignment: int) -> Comparison | None:
        guards = private.torch_guards(arrays)
        if guards is None:
            return None
        torch, gradients = sys.modules["torch"], True in map(_REQUIRES_GRAD, arrays)

        def addresses_of(tensors: Sequence[Any]) -> list[int] | None:
            for tensor in tensors:  # in calls of known sizes a plain loop is faster than `map`
                if tensor.is_nested:  # it has no strides: the guards, which ask for them, would end the process
                    return None
            if not guards(*tensors) or (gradients and torch.is_grad_enabled()):
                return None
            addresses, bits = [], 0
            try:
                for tensor in tensors:
                    address = tensor.data_ptr()
                    addresses.append(address)
                    bits |= address
            except RuntimeError:  # no memory of its own, for instance under torch.vmap
                return None
            return None if bits % alignment else addresses

        return addresses_of

    def device_of(self, obj: Any) -> int | None:
        device = obj.device
        return HOST if device.type == "cpu" else device.index if device.type == "cuda" else None

    def wants_gradient(self, obj: Any) -> bool:
        return obj.requires_grad and sys.modules["torch"].is_grad_enabled()

    def host_view(self, obj: Any, dtype: np.dtype) -> np.ndarray:
        obj = obj.detach()
        narrow = _NARROW.get(dtype)
        return obj.numpy() if narrow is None else obj.view(self.native_dtype(narrow)).numpy().view(dtype)

    def empty(self, device: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        if device == HOST:
            return sys.modules["torch"].empty(shape, dtype=self.native_dtype(dtype), device="cpu")
        with self.to_device(device):
            return self.maker()(shape, dense_strides(shape), self.native_dtype(dtype))

    def gpus(self) -> int:
        cuda = sys.modules["torch"].cuda
        return cuda.device_count() if cuda.is_available() else 0

    def widened(self, obj: Any) -> Any:
        return obj.view(self.native_dtype(E4M3)).float()

    def rounded(self, obj: Any) -> Any:
        return obj.bfloat16()

    def repeated(self, obj: Any, times: int, axis: int) -> Any:
        return obj.repeat_interleave(times, axis)

    def native_dtype(self, dtype: np.dtype) -> Any:
        return _torch_dtypes()[1][np.dtype(dtype)]

    def to_device(self, device: int) -> AbstractContextManager[Any]:
        return sys.modules["torch"].cuda.device(device)

    def device_reader(self) -> Callable[[], int]:
        return _torch_device_reader()

    def stream_reader(self, device: int) -> Callable[[], int]:
        return _torch_stream_reader(device)

    def maker(self) -> Callable[..., Any]:
        return _torch_maker()

    def result_maker(self, results: Sequence[Array]) -> Callable[[], tuple[list[Any], list[int]]]:
        make, address = self.maker(), sys.modules["torch"].Tensor.data_ptr
        shapes, strides = [*map(_SHAPE, results)], [*map(_STRIDES, results)]
        dtypes = [*map(_torch_dtypes()[1].__getitem__, map(_DTYPE, results))]

        def make_results() -> tuple[list[Any], list[int]]:
            results = [*map(make, shapes, strides, dtypes)]
            return results, [*map(address, results)]

        return make_results

    def scratch_allocator(self) -> Callable[[int], tuple[int, Any]]:
        make, uint8 = self.maker(), self.native_dtype(UINT8)

        def scratch(nbytes: int) -> tuple[int, Any]:
            memory = make((nbytes,), (1,), uint8)
            return memory.data_ptr(), memory

        return scratch


LIBRARIES: dict[str, Library] = {library.name: library for library in (NumPyLibrary(), CuPyLibrary(), TorchLibrary())}


def _described_by_bytes(name: str, obj: Any, place: Place, ptr: int) -> Array:
    """The description of an array whose strides count bytes."""
    dtype, strides = obj.dtype, obj.strides
    if not dtype.isnative:
        raise TypeError(f"{name}: expected native byte order, got dtype {dtype.str}")
    size = dtype.itemsize
    if size == 0:
        raise TypeError(f"{name}: expected items of at least a byte, got dtype {dtype}")
    if any(map(mod, strides, repeat(size))):
        raise ValueError(f"{name}: strides {strides} bytes are no multiples of the item size {size}")
    return Array(name, obj, place, dtype, obj.shape, tuple(map(floordiv, strides, repeat(size))), ptr)


@cache
def _torch_dtypes() -> tuple[dict[Any, np.dtype], dict[np.dtype, Any]]:
    torch = sys.modules["torch"]
    names = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
    more = ("uint16", "uint32", "uint64", "complex64", "complex128")
    known = {getattr(torch, n): np.dtype(n) for n in (*names, *more) if hasattr(torch, n)}
    known[torch.bfloat16] = BFLOAT16
    known[torch.float8_e4m3fn] = E4M3
    known[torch.float8_e5m2] = E5M2
    if hasattr(torch, "float8_e8m0fnu"):
        known[torch.float8_e8m0fnu] = E8M0
    return known, {v: k for k, v in known.items()}


@lru_cache(maxsize=1024)
def _plain_dtypes(kinds: tuple[tuple[Any, ...], ...]) -> list[np.dtype] | None:
    """NumPy's dtypes for strided tensors of one device, each given by its dtype, device and layout. None for others."""
    dtypes, devices, layouts = zip(*kinds, strict=True)
    known = _torch_dtypes()[0]
    plain = known.keys() >= {*dtypes} and {*layouts} == {sys.modules["torch"].strided} and len({*devices}) == 1
    return [*map(known.__getitem__, dtypes)] if plain else None


def as_dtype(dtype: Any) -> np.dtype:
    """NumPy's dtype for one of NumPy's, CuPy's or torch's."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(dtype, torch.dtype):
            return _torch_dtypes()[0][dtype]
        found = np.dtype(dtype)
    except (KeyError, TypeError, ValueError):
        found = None
    if dtype is None or found is None or found.itemsize == 0:  # to NumPy, None means float64
        raise TypeError(f"dtype: expected one that NumPy or torch has, got {shown(dtype)}")
    return found


def library_of(array: Any) -> Library | None:
    """The library that `array` is of; None: it is no array."""
    return library_of_class(type(array))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def library_of_class(cls: Any) -> Library | None:
    """The library whose arrays have this class; None: there is none."""
    if issubclass(cls, np.ndarray):
        return LIBRARIES["numpy"]
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(cls, torch.Tensor):
        return LIBRARIES["torch"]
    cupy = sys.modules.get("cupy")
    if cupy is not None and issubclass(cls, cupy.ndarray):
        return LIBRARIES["cupy"]
    return None


def _no_array(obj: Any) -> str:
    return f"expected a NumPy, CuPy or torch array, got {type(obj).__module__}.{type(obj).__qualname__}"


# How to install the libraries for a GPU.
INSTALL = "in a checkout of cupy_mla, pip install '.[cuda12]' (driver for CUDA 12) or '.[cuda13]' (for CUDA 13)"


def require_cupy(why: str) -> ModuleType:
    """CuPy with a working GPU behind it.

    Raises:
        RuntimeError: one sentence on what is missing and what to install.
    """
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise RuntimeError(f"{why} needs CuPy: {INSTALL}") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"{why} needs an NVIDIA GPU with a driver for CUDA 12 or later: {error}") from error
    if count == 0:
        raise RuntimeError(f"{why} needs an NVIDIA GPU, and the driver sees none")
    return cupy


def require_torch(why: str) -> ModuleType:
    """torch.

    Raises:
        RuntimeError: it is missing.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise RuntimeError(f"{why} needs torch: pip install torch") from error


def require_array(name: str, obj: Any) -> None:
    """Check that an argument is an array.

    Raises:
        TypeError: it is not, and the message names it.
    """
    if library_of(obj) is None:
        raise TypeError(f"{name}: {_no_array(obj)}")


def cuda_available() -> bool:
    """True when CuPy is installed and sees a GPU.

    Example:
        >>> library = "CuPy" if cupy_mla.cuda_available() else "NumPy"
    """
    try:
        require_cupy("this check")
    except RuntimeError:
        return False
    return True


# --- places ---------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    kind: LibraryName
    device: int


class Place(_Place):
    """Where the arrays of one call live: the library that owns them and the device.

    Args:
        kind: "numpy", "cupy" or "torch".
        device: number of a GPU, or `cupy_mla.arrays.HOST` (-1): host memory.

    Raises:
        TypeError, ValueError: an argument is none of these, or the library's arrays do not lie there.
    """

    def __new__(cls, kind: LibraryName, device: int) -> Place:
        require_choice("kind", kind, LIBRARIES)
        least, most = {"numpy": (HOST, HOST), "cupy": (0, None)}.get(kind, (HOST, None))
        where = "where NumPy arrays lie: in host memory" if kind == "numpy" else ""
        return super().__new__(cls, kind, require_integer("device", device, least, most, where))

    @classmethod
    def from_pair(cls, place: Any) -> Place:
        """The place that a pair of kind and device names.

        Raises:
            TypeError, ValueError: it names none.
        """
        try:
            kind, device = place
        except (TypeError, ValueError):
            raise TypeError(
                f"place: expected a kind of array and a device, as ('torch', 0), got {shown(place)}"
            ) from None
        return cls(kind, device)

    @property
    def library(self) -> Library:
        return LIBRARIES[self.kind]

    @property
    def on_gpu(self) -> bool:
        return self.device != HOST

    @classmethod
    def of(cls, array: AnyArray) -> Place:
        """Where `array` lives."""
        return describe("array", array).place

    def admit(self, array: Array) -> Array:
        """Check that an argument lives here, too; returns it.

        Raises:
            TypeError: another library's array. ValueError: another device. Both name the argument.
        """
        if array.place is self:
            return array
        if array.kind != self.kind:
            raise TypeError(f"{array.name}: expected a {self.kind} array as the others are, got a {array.kind} one")
        if array.device != self.device:
            here, there = _device_name(self.device), _device_name(array.device)
            raise ValueError(f"{array.name}: expected it on {here} as the others are, got {there}")
        return array

    def optional(self, **arguments: Any) -> list[Array | None]:
        """Describe arguments that a call may leave out, as `bind` does the others. None stays None."""
        if not any(map(is_not, arguments.values(), repeat(None))):
            return [None] * len(arguments)
        return [None if value is None else self.admit(describe(name, value)) for name, value in arguments.items()]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A new uninitialised array of the caller's kind, on the caller's device and stream; e4m3 as uint8 in CuPy.

        Raises:
            RuntimeError: the library, or a GPU, is missing.
            ValueError: no memory can be so large.
        """
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes > sys.maxsize:
            raise ValueError(f"place: an array of shape {list(shape)} takes {nbytes} bytes, more than can be addressed")
        if self.kind not in sys.modules:
            (require_cupy if self.kind == "cupy" else require_torch)(f"a {self.kind} array")
        try:
            return self.library.empty(self.device, shape, np.dtype(dtype))
        except (AssertionError, RuntimeError) as error:
            if not self.on_gpu or self.device < self.library.gpus():
                raise
            raise RuntimeError(
                f"place: there is no {_device_name(self.device)}, {self.kind} sees {self.library.gpus()} GPUs"
            ) from error

    def new(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """A new uninitialised array, described."""
        return describe(name, self.empty(shape, dtype))

    def output(
        self, name: str, given: Array | None, shape: tuple[int, ...], dtype: np.dtype, may_be: Array | None = None
    ) -> Array:
        """The caller's output array, checked, or a new one where none was given.

        Args:
            may_be: the input that the caller may give as this output, to have it overwritten.
        """
        if given is None:
            return self.new(name, shape, dtype)
        given.may_be = may_be
        return given.require(dtype, *shape).require_writable()

    def carve(self, whole: Any, start: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An array of this shape and dtype over the bytes of a uint8 array of this place, from byte `start` on."""
        part = whole[start : start + math.prod(shape) * np.dtype(dtype).itemsize]
        return part.view(self.library.native_dtype(dtype) if self.kind == "torch" else dtype).reshape(shape)

    def call(self, launcher: Callable[..., Any], reference: Callable[..., None], *arguments: Any) -> None:
        """Hand checked arguments on the host to the NumPy reference, as NumPy views of the same memory.

        The place of a call on a GPU (`cupy_mla.calls`) hands them to the launcher instead. Both take the same arguments
        in the same order; a named tuple among them (`cupy_mla.arguments`) holds several.

        Raises:
            RuntimeError: a tensor wants a gradient, which neither can give.
            ValueError: an array that is written overlaps another one.
        """
        given = arrays_in(arguments)
        for a in given:
            a.require_no_gradient()
        others = [*given]
        for written in filter(_WRITTEN, given):
            others.remove(written)
            for other in others:
                written.require_apart(other)
        reference(*with_arrays(arguments, Array.numpy))

    def current(self) -> AbstractContextManager[Any]:
        """A context in which this GPU is the current device."""
        return self.library.to_device(self.device)

    def is_capturing(self) -> bool:
        """Whether the caller's current stream of this GPU is being captured in a CUDA graph."""
        return require_cupy("a CUDA array").cuda.runtime.streamIsCapturing(self.stream())

    def stream(self) -> int:
        """The handle of the caller's current CUDA stream: torch's for torch tensors, CuPy's for CuPy arrays."""
        return self.library.stream_reader(self.device)()


@cache
def place_at(kind: LibraryName, device: int) -> Place:
    """The `Place` of arrays that exist. It is made and checked once."""
    return Place(kind, device)


def require_apart(written: str, a: Any, other: str, b: Any, may_be: bool) -> None:
    """Check that array `a`, which is written, does not overlap array `b`. `may_be`: it may be all of b."""
    described, against = describe(written, a), describe(other, b)
    described.may_be = against if may_be else None
    described.require_apart(against)


def describe(name: str, obj: Any) -> Array:
    """Describe an argument. For a call on a GPU it is a description already, which is returned.

    Raises:
        TypeError, ValueError: it is no array, or one that no operation takes. Both name the argument.
    """
    if isinstance(obj, Array):
        obj.name = name
        return obj
    library = library_of(obj)
    if library is None:
        raise TypeError(f"{name}: {_no_array(obj)}")
    return library.describe(name, obj)


def bind(**arguments: Any) -> tuple[Place, list[Array]]:
    """Describe the array arguments that one call must have; `Place.optional` describes the others.

    Returns:
        the place all of them live in, and a description of each, in the order given.

    Raises:
        TypeError: something is no array, or kinds are mixed.
        ValueError: devices are mixed. Both name the argument.
    """
    described = [*arguments.values()]
    if {*map(type, described)} != {Array} or [*map(_NAME, described)] != [*arguments]:
        described = [*map(describe, arguments, described)]
    place = described[0].place
    if len({*map(_PLACE, described)}) > 1:
        for array in described:
            place.admit(array)
    return place, described


def _device_name(device: int) -> str:
    return "the CPU" if device == HOST else f"cuda:{device}"


# --- bridges --------------------------------------------------------------------------------------------------


def to_numpy(array: AnyArray) -> np.ndarray:
    """`array` as NumPy: the same memory when it is on the host, a copy when it is on a GPU (synchronises).

    Example:
        >>> cupy_mla.to_numpy(np.arange(3)).tolist()
        [0, 1, 2]
    """
    a = describe("array", array)
    if a.device == HOST:
        return a.numpy()
    if a.kind == "torch":
        return a.library.host_view(a.obj.detach().cpu(), a.dtype)
    return a.obj.view(UINT8).get().view(E5M2) if a.dtype == E5M2 else a.obj.get()  # CuPy has no kernels for e5m2


def to_cupy(array: AnyArray) -> Any:
    """`array` as CuPy: the same memory when it is on a GPU (DLPack), a copy when it is on the host.

    bfloat16 stays bfloat16, and float8_e5m2 that, which CuPy has no kernels for; other fp8 comes as uint8.

    Raises:
        RuntimeError: CuPy or a GPU is missing.

    Example:
        >>> a = np.arange(3)
        >>> a = cupy_mla.to_cupy(a) if cupy_mla.cuda_available() else a
    """
    cupy = require_cupy("to_cupy")
    a = describe("array", array)
    if a.kind == "cupy":
        return array
    narrow = _NARROW.get(a.dtype, a.dtype)
    if a.device == HOST:
        moved = cupy.asarray(a.numpy().view(narrow))
    else:
        moved = cupy.from_dlpack(a.obj.detach().view(a.library.native_dtype(narrow)))
    return moved.view(a.dtype) if a.dtype in (BFLOAT16, E5M2) else moved


def to_torch(array: AnyArray, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`array` as a torch tensor over the same memory, on the host or on a GPU (DLPack).

    Args:
        dtype: a torch dtype of the same item size to view the result as (e.g. `torch.float8_e4m3fn` for uint8).

    Raises:
        RuntimeError: torch is missing.
        TypeError: torch has no such dtype.
        ValueError: a stride is negative or the memory read-only, which torch cannot hold, or `dtype` has another item
            size.

    Example:
        >>> a = np.zeros(3, bfloat16)
        >>> tensor = cupy_mla.to_torch(a)
        >>> tensor.fill_(2).dtype
        torch.bfloat16
        >>> a.tolist()  # the same memory
        [2.0, 2.0, 2.0]
    """
    torch = require_torch("to_torch")
    a = describe("array", array)
    if a.dtype not in _torch_dtypes()[1]:
        raise TypeError(f"array: torch has no dtype for {a.dtype}")
    if not a.library.writable(a.obj):  # torch would write to it all the same
        raise ValueError(
            "array: expected a writable array, got a read-only one, which torch cannot hold: copy it before"
        )
    if a.kind == "torch":
        moved = a.obj
    elif any(stride < 0 for stride in a.strides):  # torch's DLPack import ends the process over one
        raise ValueError(f"array: torch has no negative strides, got {list(a.strides)} (in items)")
    else:
        narrow = _NARROW.get(a.dtype, a.dtype)
        plain = a.obj.view(narrow) if narrow != a.dtype else a.obj
        moved = torch.from_dlpack(plain).view(_torch_dtypes()[1][a.dtype])
    if dtype is None:
        return moved
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch dtype, got {shown(dtype)}")
    if dtype.itemsize != moved.dtype.itemsize:
        raise ValueError(f"dtype: expected one of {moved.dtype.itemsize} bytes an item as {moved.dtype}, got {dtype}")
    return moved.view(dtype)
