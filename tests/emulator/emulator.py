"""A GPU whose kernels run on the CPU: `EmulatedGPU`, built on the stand-in for a GPU.

`kernels_cu` is compiled by g++ as it is, with the headers of this folder in the place of `ptx/` (machine.h says how
the machine works). The compiled libraries lie in `.pytest_cache/emulator`, under a hash of all that they depend on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from cupy_mla.cuda.kernel import Kernel, kernels_root

from ..fake_gpu import FakeGPU, Submitted

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent / ".pytest_cache" / "emulator"
COMPILER = shutil.which("g++")
FLAGS = (
    "-std=c++17", "-O2", "-march=native", "-ffp-contract=fast", "-fno-strict-aliasing", "-fno-gnu-unique",
    "-fvisibility=hidden", "-shared", "-fPIC", "-w",
)  # fmt: skip
SM_THREADS, SM_CTAS = 2048, 32

needs_compiler = pytest.mark.skipif(
    COMPILER is None or platform.machine() not in ("x86_64", "aarch64"), reason="the emulator needs g++"
)


class EmulatedGPU(FakeGPU):
    """Stands in for device 0 while a monkeypatch lasts, and runs what is launched, at once.

    Attributes:
        seed: of the order in which warps run and copies are done; each launch has another one.
        launched: names of the kernels that ran.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sms: int = 4, capability: int = 90, seed: int = 1) -> None:
        super().__init__(monkeypatch, sms, capability)
        self.seed = seed
        self.launched: set[str] = set()
        self._sms, self._capability = sms, capability

    def take(self, submitted: Submitted) -> None:
        super().take(submitted)
        if submitted.kernel is None:
            address, value, nbytes = submitted.params
            ctypes.memset(int(address), value, int(nbytes))
            return
        self.seed += 1
        self.launched.add(submitted.kernel.name)
        library = load(submitted.kernel, self._capability)
        library.run(submitted.grid[:3], submitted.grid[3], submitted.params, self._sms, self.seed)


class Library:
    """A compiled kernel.

    Attributes:
        threads, shared_bytes: of a CTA.
    """

    def __init__(self, path: Path, name: str, alone: bool = False) -> None:
        threads, shared_bytes = ctypes.c_int(), ctypes.c_int()
        self._name, self._alone = name, alone
        self._handle = machine().emu_load(str(path).encode(), ctypes.byref(threads), ctypes.byref(shared_bytes))
        self.threads, self.shared_bytes = threads.value, shared_bytes.value

    def run(self, grid: tuple[int, ...], cluster: int, params: bytes, sms: int, seed: int) -> None:
        """Launch it, with as many CTAs at a time as an SM could have.

        Raises:
            RuntimeError: a deadlock, or what the machine does not allow.
        """
        per_sm = min(SM_CTAS, SM_THREADS // self.threads, 228 * 1024 // (self.shared_bytes + 1024))
        at_once = max(sms * (1 if self._alone else max(per_sm, 1)), cluster)
        error = machine().emu_run(self._handle, (ctypes.c_uint32 * 3)(*grid), cluster, params, at_once, seed)
        if error:
            raise RuntimeError(f"{self._name}, grid {grid}, clusters of {cluster}, seed {seed}: {error.decode()}")


_LOADED: dict[tuple[int, int], tuple[Kernel, Library]] = {}


def load(kernel: Kernel, capability: int) -> Library:
    """A kernel, compiled for the machine as for this compute capability."""
    known = _LOADED.get((id(kernel), capability))
    if known is None:
        path = compiled(kernel.file, kernel.name, kernel.defines, capability, kernel.source)
        known = _LOADED[id(kernel), capability] = kernel, Library(path, repr(kernel), kernel.alone)
    return known[1]


def compiled(file: str, name: str, defines: dict[str, int], capability: int, source: str) -> Path:
    """The library of a file, in `kernels_cu` or anywhere.

    Raises:
        RuntimeError: the compiler's messages.
    """
    constants = [f"-D{k}={v}" for k, v in sorted(defines.items())]
    constants += [f"-D__CUDA_ARCH__={10 * capability}", f"-DKERNEL={name}", f'-DKERNEL_FILE="{file}"']
    folders = [f"-I{HERE}", f"-I{kernels_root()}"]
    return _library([*FLAGS, "-nostartfiles", *constants, *folders, str(HERE / "kernel.cpp")], source, name)


@cache
def machine() -> ctypes.CDLL:
    """The machine, whose functions kernels call."""
    path = _library([*FLAGS, "-fvisibility=default", f"-I{HERE}", str(HERE / "machine.cpp")], "", "machine")
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    integer = ctypes.POINTER(ctypes.c_int)
    library.emu_load.argtypes = [ctypes.c_char_p, integer, integer]
    library.emu_load.restype = ctypes.c_void_p
    library.emu_run.argtypes = [
        ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32, ctypes.c_char_p, ctypes.c_int,
        ctypes.c_uint32,
    ]  # fmt: skip
    library.emu_run.restype = ctypes.c_char_p
    return library


def _library(arguments: list[str], source: str, name: str) -> Path:
    key = hashlib.sha256(repr((arguments, source, _environment())).encode()).hexdigest()[:32]
    path = FOLDER / f"{name}-{key}.so"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=FOLDER, suffix=".new", delete=False) as file:
            done = subprocess.run([str(COMPILER), *arguments, "-o", file.name], capture_output=True, text=True)
            if done.returncode != 0:
                os.unlink(file.name)
                raise RuntimeError(f"{name}: {done.stderr[:8000]}")
        os.replace(file.name, path)  # whole or not at all, for whoever else looks
    return path


@cache
def _environment() -> tuple[str, ...]:
    """What libraries depend on beside their own source: the machine's files, the compiler, the CPU."""
    files = sorted(p for p in HERE.rglob("*") if p.suffix in (".h", ".cpp", ".cuh"))
    version = subprocess.run([str(COMPILER), "--version"], capture_output=True, text=True).stdout
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))]
    return (*(p.read_text() for p in files), version, *cpu[:1])
