"""The report of `python -m cupy_mla`: what is installed, which kernels this GPU has, and whether results are right."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..bridges import INSTALL, require_cupy, to_cupy
from ..cuda import all_kernels
from ..cuda.driver import gpu
from ..cuda.kernel import LEAST_ARCH, Kernel
from ..ops.table import Wanted
from .cases import cases, float64_error

ALL_WELL, WRONG, NO_GPU = 0, 1, 2  # exit status

FLOAT64_ERROR = 4e-3  # relative error that rounding results to bf16 explains


def run(device: int | None = None, verbose: bool = False) -> int:
    """Check this machine and print the report.

    Args:
        device: the GPU to check; None: all.
        verbose: print every kernel and call, not only every file and operation.

    Returns:
        the exit status: 0 if kernels run on the GPU and agree with the NumPy reference, 1 if something is wrong, 2 if
        there is no GPU, so that the NumPy reference runs.
    """
    for name, version in versions():
        print(f"{name:<12} {version}")
    try:
        cupy = require_cupy("Running on a GPU")
        print(f"{'NVRTC':<12} {nvrtc_version()}")
    except RuntimeError as error:
        print(f"\n{error}")
        return NO_GPU if _check_numpy(verbose) else WRONG
    missing = no_such_gpu(cupy, device)
    if missing:
        print(f"\n{missing}")
        return WRONG
    runtime = cupy.cuda.runtime
    print(f"{'driver':<12} {driver_version(runtime.driverGetVersion())}")
    print(f"{'cache':<12} {os.environ.get('CUPY_CACHE_DIR', '~/.cupy/kernel_cache')} (compiled kernels)")
    devices = range(runtime.getDeviceCount()) if device is None else [device]
    return ALL_WELL if all([_check_gpu(cupy, number, verbose) for number in devices]) else WRONG


def no_such_gpu(cupy: Any, device: int | None) -> str | None:
    """The message for a device that this machine does not have; None: it has it, or none was asked for."""
    count = cupy.cuda.runtime.getDeviceCount()
    if device is None or 0 <= device < count:
        return None
    return f"there is no GPU {device}: this machine has {count}, counted from 0"


def versions() -> Iterator[tuple[str, str]]:
    """Names and versions of the libraries that matter, installed or not."""
    yield "cupy_mla", f"{__version__} in {Path(__file__).parent.parent}"
    yield "Python", platform.python_version()
    for name, distributions in (
        ("NumPy", ["numpy"]),
        ("ml_dtypes", ["ml_dtypes"]),
        ("CuPy", ["cupy-cuda12x", "cupy-cuda13x", "cupy"]),
        ("torch", ["torch"]),
    ):
        found = [
            f"{version} ({d})" if d != name.lower() else version for d in distributions if (version := _version(d))
        ]
        optional = " (optional)" if name == "torch" else f": {INSTALL}" if name == "CuPy" else ""
        yield name, ", ".join(found) or f"not installed{optional}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version(cuda: int) -> str:
    """The driver's version, if Linux tells it, and the CUDA version that it supports."""
    try:
        told = re.search(r"\b\d{3}\.[\d.]+", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        told = None
    number = f"{told.group()}, " if told else ""
    return f"{number}for CUDA {cuda // 1000}.{cuda % 1000 // 10} and earlier"


def nvrtc_version() -> str:
    """The version of the compiler.

    Raises:
        RuntimeError: it was not found; says what to install.
    """
    try:
        return ".".join(map(str, importlib.import_module("cupy.cuda").nvrtc.getVersion()))
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(f"NVRTC, which compiles the kernels, was not found: {INSTALL}\n({error})") from error


def _check_numpy(verbose: bool) -> bool:
    """Whether the operations run and attention is right, in NumPy alone."""
    rng = np.random.default_rng()
    started, calls = time.perf_counter(), 0
    for case in cases(rng):
        case.run(np.asarray)
        calls += 1
        if verbose:
            print(f"  {case.name}")
    error = float64_error(rng)
    right = error < FLOAT64_ERROR
    print(
        f"NumPy reference: {calls} calls in {time.perf_counter() - started:.1f} s; "
        f"decode is {error:.1e} from float64, relative: {'right' if right else 'WRONG'}"
    )
    return right


def _check_gpu(cupy: Any, device: int, verbose: bool) -> bool:
    """Compile this GPU's kernels and compare every operation with the reference; whether all is well."""
    capability = gpu(device).capability
    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    print(f"\nGPU {device}: {name}, compute capability {capability / 10}, {gpu(device).sms} SMs")
    if capability < LEAST_ARCH:
        print("too old: the kernels need compute capability 8.0 or later")
        return False
    return _compile(device, capability, verbose) and _compare(cupy, device, verbose)


def _compile(device: int, capability: int, verbose: bool) -> bool:
    kernels = [kernel for kernel in all_kernels() if kernel.suits(capability)]
    started = time.perf_counter()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        done = list(pool.map(lambda kernel: _timed(lambda: kernel.load(device)), kernels))
    print(f"{len(kernels)} kernels compiled, or loaded from the cache, in {time.perf_counter() - started:.1f} s")
    by_file: dict[str, list[tuple[Kernel, float, Exception | None]]] = {}
    for kernel, (seconds, failure) in zip(kernels, done, strict=True):
        by_file.setdefault(kernel.file, []).append((kernel, seconds, failure))
    for file, variants in sorted(by_file.items()):
        target = variants[0][0].target or capability
        longest = max(seconds for _, seconds, _ in variants)
        print(f"  {file:<36} sm_{target:<4} {len(variants):3} variants, the longest {longest:.2f} s")
        for kernel, seconds, failure in variants:
            if verbose or failure:
                print(f"    {seconds:6.2f} s  {kernel!r}" + (f"\n    FAILED: {failure}" if failure else ""))
    others = sorted({k.file for k in all_kernels()} - set(by_file))
    if others:
        print("  not for this GPU: " + ", ".join(others))
    return all(failure is None for _, failure in done)


def _timed(call: Callable[[], Any]) -> tuple[float, Exception | None]:
    started = time.perf_counter()
    failure = None
    try:
        call()
    except Exception as error:  # any error is reported, and the others go on
        failure = error
    return time.perf_counter() - started, failure


def _compare(cupy: Any, device: int, verbose: bool) -> bool:
    """Compare every operation over CuPy arrays with NumPy; whether all agree."""
    right: dict[str, list[bool]] = {}
    started = time.perf_counter()
    with cupy.cuda.Device(device):
        for case in cases(np.random.default_rng(), Wanted(many=gpu(device).sms + 4)):
            try:
                agrees = case.agrees(case.run(to_cupy), case.run(np.asarray))
            except Exception as error:  # as above
                print(f"  {case.name}: {type(error).__name__}: {error}")
                agrees = False
            right.setdefault(case.operation.name, []).append(agrees)
            if verbose or not agrees:
                print(f"  {'right' if agrees else 'WRONG':<6} {case.name}")
    print(f"operations compared with the NumPy reference, in {time.perf_counter() - started:.1f} s")
    for operation, agreed in right.items():
        print(f"  {operation:<36} {sum(agreed)} of {len(agreed)} calls right")
    return all(all(agreed) for agreed in right.values())
