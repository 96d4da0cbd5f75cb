"""Compiles kernels at run time with CuPy's RawModule (NVRTC) and launches them.

A `Kernel` is one entry point of one `.cu` file under one set of constants. Its source is read as text and the
package's own `#include "..."` lines are resolved into one string, because CuPy's disk cache keys on the string
and the options, not on headers behind `-I`. Nothing here needs a GPU until a kernel is launched: `Kernel.compile`
serves the compile tests of a machine without one.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ..arrays import Array, Place, require_cupy
from ..recording import Code, Packed, Pointer, recording

log = logging.getLogger("cupy_mla")

# Every GPU generation the portable kernels are compiled for in the tests; newer ones run through the same source.
PORTABLE = ("80", "86", "89", "90", "100", "120")
LEAST_ARCH = 80

# Blocks that a cluster may have on every GPU with clusters, and on Hopper, with leave by function attribute.
PORTABLE_CLUSTER, MAX_CLUSTER = 8, 16
SM90_SHARED_BYTES = 232448  # of shared memory a block may have on Hopper
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14  # CUfunction_attribute
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_OVERLAP_DRIVER = 12030  # the first whose graphs take launches that overlap

Submit = Callable[[int, bytes], None]  # a launch that lacks its stream and its parameters


@dataclass(frozen=True)
class Launch:
    """A step of a recording.

    Attributes:
        sizes: the CUfunction, the grid, threads and bytes of shared memory a block; None for a launch that is
            cooperative or has attributes.
    """

    submit: Submit
    params: Packed
    sizes: tuple[int, tuple[int, int, int], int, int] | None

    def __call__(self, code: Code) -> None:
        """Write it into a plan."""
        code.line(f"{code.name(self.submit)}(stream, {code.params(self.params)})")


_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*$')


@lru_cache(maxsize=1)
def kernels_root() -> Path:
    """The folder of the CUDA sources: inside the installed package, beside it in a checkout.

    Raises:
        FileNotFoundError: the package was installed without its kernels.
    """
    package = Path(__file__).resolve().parent.parent
    for root in (package / "kernels_cu", package.parent / "kernels_cu"):
        if root.is_dir():
            return root
    raise FileNotFoundError(f"the CUDA sources (kernels_cu) are neither in {package} nor beside it")


@cache
def read_source(file: str) -> str:
    """The text of `kernels_cu/<file>` with the package's own includes put in their place.

    `#pragma once` means nothing inside one string, so every included file is wrapped in a guard instead; `#line`
    keeps the compiler's messages on the files that people edit.
    """
    root = kernels_root()

    def expand(name: str, above: tuple[str, ...]) -> str:
        if name in above:
            raise ValueError(f"kernels_cu/{name} includes itself through {' -> '.join(above)}")
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate((root / name).read_text().splitlines(), start=1):
            include = _INCLUDE.match(line)
            if include:
                included = include.group(1)
                guard = "INCLUDED_" + re.sub(r"\W", "_", included).upper()
                body = expand(included, (*above, name))
                lines += [f"#ifndef {guard}", f"#define {guard}", body, "#endif", f'#line {number + 1} "{name}"']
            elif line.strip() != "#pragma once":
                lines.append(line)
            else:
                lines.append("")
        return "\n".join(lines)

    return expand(file, ()) + "\n"


class Kernel:
    """One entry point of one source file, compiled with one set of constants.

    Args:
        file: path under kernels_cu, e.g. "attention/sparse_portable.cu".
        entry: name of the `extern "C"` kernel; it takes one struct by value.
        defines: constants, passed as -DNAME=value.
        threads: threads a block.
        shared_bytes: dynamic shared memory a block, in bytes.
        archs: compute capabilities it claims, e.g. "80"; the compile tests hold it to them.
        target: the architecture to compile for when it is not the GPU's plain one, e.g. "90a".
        spill_bytes: most bytes of registers a thread may spill to local memory; the compile tests hold it to that.
        cooperative: all blocks of a launch run at the same time, so that they may wait for each other; the grid must
            then fit the GPU.
        max_cluster: most blocks of a thread-block cluster it is launched with.
        overlaps: the kernel waits for the launches before it by itself (ptx/grid.cuh), so that its blocks may come to
            their multiprocessors while those still run ("programmatic dependent launch", from Hopper on).
    """

    def __init__(
        self,
        file: str,
        entry: str,
        defines: dict[str, int],
        *,
        threads: int,
        shared_bytes: int = 0,
        archs: Iterable[str] = PORTABLE,
        target: str | None = None,
        spill_bytes: int = 0,
        cooperative: bool = False,
        max_cluster: int = 1,
        overlaps: bool = False,
    ) -> None:
        self.file = file
        self.entry = entry
        self.defines = dict(defines)
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.archs = tuple(archs)
        self.target = target
        self.spill_bytes = spill_bytes
        self.cooperative = cooperative
        self.max_cluster = max_cluster
        self.overlaps = overlaps
        self._functions: dict[int, int] = {}  # CUfunction by device
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        constants = " ".join(f"{k}={v}" for k, v in sorted(self.defines.items()))
        return f"{self.file}:{self.entry} {constants}".strip()

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC options without the architecture."""
        return ("-std=c++17", *(f"-D{k}={v}" for k, v in sorted(self.defines.items())))

    def suits(self, capability: int) -> bool:
        """Whether it runs on a GPU of this compute capability (times 10)."""
        if self.target is None:
            return capability >= LEAST_ARCH
        return capability == int(self.target.rstrip("a"))  # "a": that generation alone

    def compile(self, arch: str) -> tuple[bytes, str]:
        """Compile for one architecture with NVRTC, without a GPU.

        Returns:
            the cubin, and ptxas' report (registers, stack, spills).

        Raises:
            RuntimeError: NVRTC's messages.
        """
        from cupy.cuda import nvrtc

        program = nvrtc.createProgram(read_source(self.file), self.file, [], [])
        options = (*self.options, f"-arch=sm_{arch}", "-ftz=true", "--ptxas-options=-v")
        try:
            nvrtc.compileProgram(program, options)
            return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{self!r} for sm_{arch}:\n{nvrtc.getProgramLog(program)}") from error
        finally:
            nvrtc.destroyProgram(program)

    def launch(self, place: Place, grid: tuple[int, int, int], params: Packed, cluster: int = 1) -> None:
        """Launch on the caller's current stream.

        Args:
            place: the GPU and the library whose stream counts.
            grid: blocks along x, y, z.
            params: the kernel's one parameter.
            cluster: neighbouring blocks along x that form a thread-block cluster.
        """
        THREAD.current_device()
        function = self._functions.get(place.device)
        if function is None:
            function = self.load(place.device)
        attributes = self._attributes(place.device, cluster)
        submit = self._submitter(function, grid, attributes)
        with place.current():
            submit(place.stream(), bytes(params))
        record = recording()
        if record is not None:
            plain = not attributes and not self.cooperative
            sizes = (function, grid, self.threads, self.shared_bytes) if plain else None
            record.steps.append(Launch(submit, params, sizes))

    @cache  # noqa: B019 kernels are as many as their variants, and kept
    def clusters_at_once(self, device: int) -> tuple[int, ...]:
        """How many clusters of 1, 2, ... `max_cluster` blocks a GPU runs at a time.

        Clusters do not span the GPU's parts, some of which have fewer multiprocessors than others, so these are less
        than its multiprocessors by the blocks.
        """
        THREAD.current_device()
        function = self._functions.get(device) or self.load(device)
        sizes = range(1, self.max_cluster + 1)
        with require_cupy("a CUDA array").cuda.Device(device):  # the driver asks the current context
            return tuple(_clusters_at_once(function, self.threads, self.shared_bytes, n) for n in sizes)

    def _attributes(self, device: int, cluster: int) -> list[_Attribute]:
        """What a launch asks for that CuPy's launches cannot."""
        attributes = [_Attribute(_CLUSTER_DIMENSION, 0, (cluster, 1, 1))] if cluster > 1 else []
        if self.overlaps and driver_version() >= _OVERLAP_DRIVER and compute_capability(device) >= 90:
            attributes.append(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1, 0, 0)))
        return attributes

    def _submitter(self, function: int, grid: tuple[int, int, int], attributes: list[_Attribute]) -> Submit:
        """Launches on a stream of the current device. The driver copies the parameters before it returns."""
        if attributes:
            return _attribute_submitter(function, grid, self.threads, self.shared_bytes, attributes)
        x, y, z, threads, shared_bytes = *grid, self.threads, self.shared_bytes
        launch, launch_cooperative = _driver().launchKernel, _driver().launchCooperativeKernel
        as_pointer, address = ctypes.c_char_p, ctypes.addressof

        def submit(stream: int, params: bytes) -> None:
            pointer = as_pointer(params)
            launch(function, x, y, z, threads, 1, 1, shared_bytes, stream, address(pointer), 0)

        def submit_cooperative(stream: int, params: bytes) -> None:
            pointer = as_pointer(params)
            launch_cooperative(function, x, y, z, threads, 1, 1, shared_bytes, stream, address(pointer))

        return submit_cooperative if self.cooperative else submit

    def loaded(self, device: int) -> bool:
        """Whether it is ready to be launched on a device."""
        return device in self._functions

    def load(self, device: int) -> int:
        """Compile (or take from CuPy's disk cache) and load for a device; `launch` does so when it is first needed.

        Safe from several threads, and from several processes: CuPy's disk cache writes a file of its own and renames
        it, and checks a hash when it reads.

        Returns:
            the CUfunction handle.

        Raises:
            RuntimeError: the GPU is too old, or NVRTC is missing.
        """
        cupy = require_cupy("a CUDA array")
        with self._lock, cupy.cuda.Device(device) as gpu:
            if device in self._functions:
                return self._functions[device]
            capability = int(gpu.compute_capability)
            if capability < LEAST_ARCH:
                raise RuntimeError(
                    f"cupy_mla needs a GPU of compute capability 8.0 or later, this one has {capability / 10}"
                )
            started = time.perf_counter()
            # NVRTC takes the more specific of two -arch options, and CuPy always adds the GPU's plain one.
            extra = () if self.target is None else (f"-arch=sm_{self.target}",)
            module = cupy.RawModule(code=read_source(self.file), options=(*self.options, *extra))
            try:
                kernel = module.get_function(self.entry)
                handle = kernel.kernel.ptr
            except (ImportError, RuntimeError) as error:
                if "nvrtc" not in str(error).lower():
                    raise
                raise RuntimeError(
                    "NVRTC, which compiles the kernels, was not found: "
                    "pip install 'cupy_mla[cuda12]' or 'cupy_mla[cuda13]'"
                ) from error
            if self.shared_bytes > 48 * 1024:
                kernel.max_dynamic_shared_size_bytes = self.shared_bytes
            if self.max_cluster > PORTABLE_CLUSTER:
                _driver().funcSetAttribute(handle, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
            _KEEP.append((module, kernel))
            self._functions[device] = handle
            log.info("%r ready for sm_%s in %.2f s", self, self.target or capability, time.perf_counter() - started)
            return handle


def clear(place: Place, array: Array) -> None:
    """Set an array without gaps to zero bytes, in order on the caller's current stream."""
    start, nbytes, memset = array.ptr, math.prod(array.shape) * array.dtype.itemsize, _runtime().memsetAsync
    with place.current():
        memset(start, 0, nbytes, place.stream())
    record = recording()
    if record is not None and isinstance(start, Pointer):
        record.steps.append(
            lambda code: code.line(f"{code.name(memset)}({code.address(start)}, 0, {code.name(nbytes)}, stream)")
        )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: of its value three words, a cluster's dimensions, or the first a switch."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 3), ("rest", ctypes.c_uint * 13)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@lru_cache(maxsize=1)
def libcuda() -> ctypes.CDLL:
    """The driver's functions that CuPy does not have."""
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    library.cuOccupancyMaxActiveClusters.argtypes = (ctypes.c_void_p,) * 3
    return library


def driver_error(name: str, status: int, about: str = "") -> RuntimeError:
    """What to raise when a function of the driver returned a status other than 0."""
    return RuntimeError(f"{name} failed: CUDA driver error {status}{about}")


def _clusters_at_once(function: int, threads: int, shared_bytes: int, cluster: int) -> int:
    attribute = _Attribute(_CLUSTER_DIMENSION, 0, (cluster, 1, 1))
    config = _LaunchConfig((cluster, 1, 1), (threads, 1, 1), shared_bytes, 0, ctypes.pointer(attribute), 1)
    count = ctypes.c_int()
    status = libcuda().cuOccupancyMaxActiveClusters(ctypes.addressof(count), function, ctypes.addressof(config))
    if status != 0:
        raise driver_error("cuOccupancyMaxActiveClusters", status, f" ({cluster} blocks)")
    return count.value


def _attribute_submitter(
    function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, attributes: list[_Attribute]
) -> Submit:
    """cuLaunchKernelEx."""
    first, handle = (_Attribute * len(attributes))(*attributes), ctypes.c_void_p(function)
    launch, as_pointer, by_reference = libcuda().cuLaunchKernelEx, ctypes.c_char_p, ctypes.byref

    @lru_cache(maxsize=16)  # a thread does not write what another one is launching with
    def config(stream: int) -> Any:
        return by_reference(_LaunchConfig(grid, (threads, 1, 1), shared_bytes, stream, first, len(attributes)))

    def submit(stream: int, params: bytes) -> None:
        status = launch(config(stream), handle, by_reference(as_pointer(params)), None)
        if status != 0:
            raise driver_error("cuLaunchKernelEx", status, f" (grid {grid})")

    return submit


_KEEP: list[Any] = []  # modules unload with their last reference


@lru_cache(maxsize=1)
def _driver() -> Any:
    from cupy_backends.cuda.api import driver

    return driver


@lru_cache(maxsize=1)
def _runtime() -> Any:
    return require_cupy("a CUDA array").cuda.runtime


class _Threads(threading.local):
    """What differs from thread to thread."""

    def current_device(self) -> int:
        """Makes a CUDA context, which a driver's launch does not, and is the runtime's function from then on."""
        runtime = _runtime()
        runtime.setDevice(runtime.getDevice())
        self.current_device = runtime.getDevice  # type: ignore[method-assign]
        return runtime.getDevice()


THREAD = _Threads()  # its current_device() is the number of this thread's current GPU


def stream_is_capturing() -> Callable[[int], bool]:
    """The function that tells whether a stream is being captured."""
    return _runtime().streamIsCapturing


@lru_cache(maxsize=1)
def driver_version() -> int:
    """The CUDA version that the driver supports, e.g. 12030 for 12.3."""
    return _runtime().driverGetVersion()


def num_sms(device: int) -> int:
    """Streaming multiprocessors of a GPU."""
    return _properties(device)["multiProcessorCount"]


def compute_capability(device: int) -> int:
    """10 times the compute capability of a GPU, e.g. 90."""
    properties = _properties(device)
    return 10 * properties["major"] + properties["minor"]


@cache
def _properties(device: int) -> dict[str, Any]:
    return _runtime().getDeviceProperties(device)
