"""Kernels: compiled at run time with CuPy's RawModule (NVRTC), and loaded once for each GPU.

A `Kernel` is one `.cu` file with one set of constants. Its source is one string, in which the package's own
`#include "..."` lines are replaced by their files: CuPy's disk cache knows a kernel by its string and options, and
would not notice a change in a header. The `.cu` file alone says how many threads and how much shared memory a CTA has,
and exports both numbers. Nothing here needs a GPU until a kernel is loaded. `Kernel.compile`, for the compile tests,
needs none.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..bridges import INSTALL, require_cupy
from . import driver
from .structs import Struct

log: logging.Logger = logging.getLogger("cupy_mla")

# The architectures for which the tests compile the portable kernels. Newer GPUs run the same source.
PORTABLE = ("80", "86", "89", "90", "100", "120")
LEAST_ARCH = 80
OPTIONS = ("-std=c++17",)  # of NVRTC, without the architecture

# What every .cu file exports: `extern "C" __device__ int`.
THREADS, SHARED_BYTES = "kernel_threads", "kernel_shared_bytes"

_INCLUDE = re.compile(r'^\s*#include\s+(?:"([^"]+)"|ROW_READER)\s*$')


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
def read_source(file: str, reader: str = "") -> str:
    """The text of `kernels_cu/<file>`, with the package's own includes replaced by their files.

    `#pragma once` means nothing inside one string, so every included file has a guard. A file is not repeated unless
    its earlier copy stands in a branch of `#if` that has ended. `#line` makes the compiler's messages name the files.

    Args:
        reader: the header of a cache layout's rows, for `#include ROW_READER`.
    """
    root = kernels_root()
    included_in: list[set[str]] = [set()]  # the files included so far, by the branches of `#if` around a line

    def expand(name: str, above: tuple[str, ...]) -> str:
        if name in above:
            raise ValueError(f"kernels_cu/{name} includes itself through {' -> '.join(above)}")
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate((root / name).read_text().splitlines(), start=1):
            if line.startswith(("#endif", "#el")):
                included_in.pop()
            if line.startswith(("#if", "#el")):
                included_in.append(set())
            include = _INCLUDE.match(line)
            included = (include.group(1) or reader) if include else ""
            if included and not any(included in branch for branch in included_in):
                guard = "INCLUDED_" + re.sub(r"\W", "_", included).upper()
                body = expand(included, (*above, name))
                lines += [f"#ifndef {guard}", f"#define {guard}", body, "#endif", f'#line {number + 1} "{name}"']
                included_in[-1].add(included)
            elif included or line.strip() == "#pragma once":
                lines.append("")
            else:
                lines.append(line)
        return "\n".join(lines)

    return expand(file, ()) + "\n"


@dataclass(frozen=True)
class Loaded:
    """A kernel on a GPU.

    Attributes:
        handle: the CUfunction.
        threads, shared_bytes: of a CTA, as the .cu file exports them.
        submit: launches it on a stream of the current device.
    """

    handle: int
    threads: int
    shared_bytes: int
    submit: driver.Submit


class Kernel:
    """One source file, compiled with one set of constants; its `extern "C"` kernel has the file's name.

    Args:
        file: path under kernels_cu, e.g. "attention/portable.cu".
        params: the struct that it takes by value.
        defines: constants; ROW_READER is the header of a cache layout's rows.
        archs: compute capabilities that it claims, e.g. "80"; the compile tests hold it to them. With one that ends in
            "a" it claims no other: its code runs on that capability alone.
        spill_bytes: bytes of registers that a thread may spill to local memory; the compile tests hold it to that.
        max_cluster: CTAs of the largest thread-block cluster that it is launched with.
        alone: each CTA has an SM for itself, because it gets more than half of the SM's shared memory.
        overlaps: the kernel waits for the launches before it itself (ptx/griddepcontrol.cuh). So its CTAs may start on
            free SMs while those still run ("programmatic dependent launch", from Hopper on).
    """

    def __init__(
        self,
        file: str,
        params: Struct,
        defines: Mapping[str, int | str],
        *,
        archs: Iterable[str] = PORTABLE,
        spill_bytes: int = 0,
        max_cluster: int = 1,
        alone: bool = False,
        overlaps: bool = False,
    ) -> None:
        self.file = file
        self.params = params
        self.defines: dict[str, int | str] = dict(defines)
        self.archs: tuple[str, ...] = tuple(archs)
        self.target: str | None = self.archs[0] if self.archs[0].endswith("a") else None
        if self.target and len(self.archs) > 1:
            raise ValueError(f"{file}: code for {self.target} runs on no other of {self.archs}")
        self.spill_bytes = spill_bytes
        self.max_cluster = max_cluster
        self.alone = alone
        self.overlaps = overlaps
        self._loaded: dict[int, Loaded] = {}  # by device
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        constants = " ".join(f"{k}={v}" for k, v in sorted(self.defines.items()))
        return f"{self.file} {constants}".strip()

    @property
    def name(self) -> str:
        """The kernel's name, which is the file's without its ending."""
        return PurePosixPath(self.file).stem

    @property
    def source(self) -> str:
        """What the compiler gets: the constants, the file with its includes, and the asserts of its structs
        (`structs.py`).

        Constants are `#define`s and not options: for options that are new in a process, CuPy compiles an empty file
        before it looks into its disk cache, which takes 25 to 45 ms.
        """
        constants = [f"#define {name} {value}" for name, value in sorted(self.defines.items())]
        text = read_source(self.file, str(self.defines.get("ROW_READER", "")))
        return "\n".join([*constants, text, '#line 1 "cupy_mla/cuda/structs.py"', *self.params.asserts(), ""])

    def suits(self, capability: int) -> bool:
        """Whether it runs on a GPU of this compute capability (times 10)."""
        if self.target is None:
            return capability >= min(map(int, self.archs))
        return capability == int(self.target.rstrip("a"))

    def compile(self, arch: str) -> tuple[bytes, str]:
        """Compile for one architecture with NVRTC, without a GPU.

        Returns:
            the cubin, and ptxas' report (registers, stack, spills).

        Raises:
            RuntimeError: NVRTC's messages.
        """
        from cupy.cuda import nvrtc

        program = nvrtc.createProgram(self.source, self.file, [], [])
        options = (*OPTIONS, f"-arch=sm_{arch}", "-ftz=true", "--ptxas-options=-v")
        try:
            nvrtc.compileProgram(program, options)
            return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{self!r} for sm_{arch}:\n{nvrtc.getProgramLog(program)}") from error
        finally:
            nvrtc.destroyProgram(program)

    def submitter(self, device: int) -> driver.Submit:
        """A function that launches the kernel on a stream of the current device. The kernel is loaded if it is not
        yet."""
        loaded = self._loaded.get(device)
        return (loaded or self.load(device)).submit

    def loaded(self, device: int) -> bool:
        """Whether it is ready to be launched on a device."""
        return device in self._loaded

    def load(self, device: int) -> Loaded:
        """Compile the kernel, or take it from CuPy's disk cache, and load it for a device.

        Safe from several threads and processes: CuPy's disk cache writes a file under another name and renames it, and
        checks a hash when it reads.

        Raises:
            RuntimeError: the GPU is too old, or NVRTC is missing.
        """
        cupy = require_cupy("a CUDA array")
        with self._lock, cupy.cuda.Device(device) as gpu:
            if device in self._loaded:
                return self._loaded[device]
            capability = int(gpu.compute_capability)
            if capability < LEAST_ARCH:
                raise RuntimeError(
                    f"cupy_mla needs a GPU of compute capability 8.0 or later, this one has {capability / 10}"
                )
            started = time.perf_counter()
            # NVRTC takes the more specific of two -arch options, and CuPy always adds the GPU's plain one.
            extra = () if self.target is None else (f"-arch=sm_{self.target}",)
            module = cupy.RawModule(code=self.source, options=(*OPTIONS, *extra))
            try:
                kernel = module.get_function(self.name)
            except (ImportError, RuntimeError) as error:
                if "nvrtc" not in str(error).lower():
                    raise
                raise RuntimeError(f"NVRTC, which compiles the kernels, was not found: {INSTALL}") from error
            _KEEP.append((module, kernel))
            threads, shared_bytes = _exported(module, THREADS), _exported(module, SHARED_BYTES)
            self._loaded[device] = self._prepared(kernel, device, threads, shared_bytes)
            log.info("%r ready for sm_%s in %.2f s", self, self.target or capability, time.perf_counter() - started)
            return self._loaded[device]

    def _prepared(self, kernel: Any, device: int, threads: int, shared_bytes: int) -> Loaded:
        """Opt in to the shared memory and the clusters of the launches, and make the function that launches."""
        handle = kernel.kernel.ptr
        if self.alone:
            shared_bytes = max(shared_bytes, driver.gpu(device).more_than_half)
        # CuPy loads equal sources once, so several kernels may share a function. None may lower what another needs.
        with _OPTING_IN:
            if shared_bytes > kernel.max_dynamic_shared_size_bytes:
                kernel.max_dynamic_shared_size_bytes = shared_bytes
        if self.max_cluster > driver.PORTABLE_CLUSTER:
            attribute = driver.api().CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            driver.call("cuFuncSetAttribute", handle, attribute, 1)
        overlapping = driver.overlaps(self, device)
        if self.max_cluster > 1 or overlapping:
            submit = driver.attribute_submitter(handle, threads, shared_bytes, overlapping)
        else:
            submit = driver.plain_submitter(handle, threads, shared_bytes)
        return Loaded(handle, threads, shared_bytes, submit)


_KEEP: list[Any] = []  # loaded modules, which would be unloaded with their last reference
_OPTING_IN = threading.Lock()  # warming up loads kernels in several threads


def _exported(module: Any, name: str) -> int:
    """The value of a variable of a loaded module."""
    value = np.empty(1, np.int32)
    with driver.relaxed_capture():
        driver.runtime().memcpy(value.ctypes.data, module.get_global(name).ptr, 4, driver.runtime().memcpyDeviceToHost)
    return int(value[0])


# --- reading cubins -------------------------------------------------------------------------------------------

_NO_BITS = 8  # the type of a section that takes no space in the file


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of a cubin, a 64-bit ELF file."""
    start, entry, count, names = (*struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58))
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * entry) for i in range(count)]
    strings = headers[names][4]
    for name, kind, _, _, offset, size in headers:
        text = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        yield text, b"" if kind == _NO_BITS else cubin[offset : offset + size]


def exported(cubin: bytes, name: str) -> int:
    """The value of a variable that a kernel's file exports, read from its cubin.

    Raises:
        KeyError: there is no variable of that name.
    """
    contents = list(sections(cubin))
    named = dict(contents)
    symbols, strings = named[".symtab"], named[".strtab"]
    for at in range(0, len(symbols), 24):
        text, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", symbols, at)
        if strings[text : strings.index(b"\0", text)].decode() == name and 0 < section < len(contents):
            stored = contents[section][1]
            return struct.unpack_from("<i", stored, value)[0] if stored else 0  # zeros take no space in the file
    raise KeyError(name)
