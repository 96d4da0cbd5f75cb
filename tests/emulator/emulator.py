"""A GPU whose kernels run on the CPU: `EmulatedGPU`, built on the stand-in for a GPU.

`kernels_cu` is compiled by g++ as it is, with the headers of this folder in the place of `ptx/` (machine.h says how
the machine works). The compiled libraries lie in `.pytest_cache/emulator`, under a hash of all that they depend on;
old ones may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from cupy_mla.cuda.kernel import Kernel, kernels_root

from ..fake_gpu import FakeGPU, Submitted

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent / ".pytest_cache" / "emulator"
COMPILER, OLDEST = shutil.which("g++") or "", 9  # from where on C++17 is no experiment of g++'s
FLAGS = (
    "-std=c++17", "-O2", "-march=native", "-ffp-contract=fast", "-fno-strict-aliasing", "-fwrapv", "-fno-gnu-unique",
    "-fno-zero-initialized-in-bss", "-fvisibility=hidden", "-fPIC", "-w",
)  # fmt: skip
SM_THREADS, SM_CTAS = 2048, 32


def why_not() -> str | None:
    """What this machine lacks to run kernels on its CPU; None: nothing."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"the emulator needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if not COMPILER:
        return f"the emulator needs g++ {OLDEST} or later, and there is none"
    told = subprocess.run([COMPILER, "-dumpversion"], capture_output=True, text=True)
    version = re.match(r"\d+", told.stdout)
    if version is None or int(version.group()) < OLDEST:
        return f"the emulator needs g++ {OLDEST} or later, {COMPILER} is {(told.stdout or told.stderr).strip()}"
    return None


needs_compiler = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class EmulatedGPU(FakeGPU):
    """Stands in for device 0 while a monkeypatch lasts, and runs what is launched, at once.

    Args:
        monkeypatch: undoes it.
        sms: how many SMs it has, which bounds the CTAs that run at a time.
        capability: compute capability, times 10.
        seed: of the order in which warps run and copies are done.

    Attributes:
        seed: that of the last launch; each has another one.
        launched: names of the kernels that ran.
        products: of each of them, how many instructions multiplied matrices, in all its warps.

    Raises:
        RuntimeError: this machine lacks what the emulator needs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sms: int = 4, capability: int = 90, seed: int = 1) -> None:
        lacking = why_not()
        if lacking:
            raise RuntimeError(lacking)
        super().__init__(monkeypatch, sms, capability)
        self.seed = seed & 0xFFFFFFF
        self.launched: set[str] = set()
        self.products: Counter[str] = Counter()
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
        self.products[submitted.kernel.name] += machine().emu_products()


class Library:
    """A compiled kernel.

    Args:
        path: of the shared library.
        name: in messages.
        alone: no two of its CTAs share an SM.

    Attributes:
        threads, shared_bytes: of a CTA.
    """

    def __init__(self, path: Path, name: str, alone: bool = False) -> None:
        threads, shared_bytes = ctypes.c_int(), ctypes.c_int()
        self._name, self._alone = name, alone
        self._handle = machine().emu_load(str(path).encode(), ctypes.byref(threads), ctypes.byref(shared_bytes))
        self.threads, self.shared_bytes = threads.value, shared_bytes.value

    def run(self, grid: tuple[int, ...], cluster: int, params: bytes, sms: int, seed: int) -> None:
        """Launch it, with at most as many CTAs at a time as `sms` SMs can hold, and wait.

        Args:
            grid: CTAs along x, y and z.
            cluster: CTAs of a cluster.
            params: the bytes of the kernel's parameter struct.
            sms: of the GPU.
            seed: of the order in which warps run and copies are done.

        Raises:
            RuntimeError: a deadlock, or what the machine does not allow.
        """
        per_sm = min(SM_CTAS, SM_THREADS // self.threads, 228 * 1024 // (self.shared_bytes + 1024))
        at_once = max(sms * (1 if self._alone else max(per_sm, 1)), cluster)
        error = machine().emu_run(self._handle, (ctypes.c_uint32 * 3)(*grid), cluster, params, at_once, seed)
        if error:
            raise RuntimeError(f"{self._name}, grid {grid}, clusters of {cluster}, seed {seed}: {error.decode()}")


@cache
def load(kernel: Kernel, capability: int) -> Library:
    """A kernel, compiled for the machine as for this compute capability (times 10)."""
    return Library(compiled(kernel.file, kernel.name, kernel.defines, capability), repr(kernel), kernel.alone)


def compiled(
    file: str, name: str, defines: dict[str, int | str], capability: int, folders: tuple[Path, ...] = ()
) -> Path:
    """The shared library of a kernel; compiled, if it is not in `FOLDER`.

    Args:
        file: the kernel's, below the first of `folders`, this folder and `kernels_cu` that has it; so are its includes.
        name: of the kernel.
        defines: its constants.
        capability: of the GPU, times 10.
        folders: to look into first.

    Raises:
        RuntimeError: the compiler's messages.
    """
    if file.startswith("attention/"):  # templates of merge.cuh name it: NVRTC looks only at those in use, g++ at all
        defines = {"MAX_CLUSTER": 16, **defines}
    constants = [f"-D{k}={v}" for k, v in sorted(defines.items())]
    constants += [f"-D__CUDA_ARCH__={10 * capability}", f"-DKERNEL={name}"]
    text = source_of(file, (*folders, HERE, kernels_root()), str(defines.get("ROW_READER", "")))
    text = text.replace("extern __shared__", "extern")  # kernel.cpp has this array; __shared__ alone means `static`
    return _library("kernel.cpp", text, ["-nostartfiles", "-include", str(_standard()), *constants], name)


def source_of(file: str, folders: tuple[Path, ...], reader: str = "") -> str:
    """A file's text with the files that it includes, as `Kernel.source` has them."""
    path = next(folder / file for folder in folders if (folder / file).is_file())
    lines = [f'#line 1 "{file}"']
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        include = re.match(r'\s*#include (?:"(.+/.+)"|ROW_READER)', line)
        if include:
            included = include.group(1) or reader
            guard = "INCLUDED_" + re.sub(r"\W", "_", included)
            body = source_of(included, folders, reader)
            lines += [f"#ifndef {guard}", f"#define {guard}", body, "#endif", f'#line {number + 1} "{file}"']
        else:
            lines.append("" if line.strip() == "#pragma once" else line)
    return "\n".join(lines)


@cache
def machine() -> ctypes.CDLL:
    """The library of machine.cpp, whose functions kernels call."""
    path = _library("machine.cpp", "", ["-fvisibility=default"], "machine")
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    integer = ctypes.POINTER(ctypes.c_int)
    library.emu_load.argtypes = [ctypes.c_char_p, integer, integer]
    library.emu_load.restype = ctypes.c_void_p
    library.emu_run.argtypes = [
        ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32, ctypes.c_char_p, ctypes.c_int,
        ctypes.c_uint32,
    ]  # fmt: skip
    library.emu_run.restype = ctypes.c_char_p
    library.emu_products.argtypes, library.emu_products.restype = [], ctypes.c_uint64
    return library


@cache
def _standard() -> Path:
    """`standard.h`, beside which lies what g++ has made of it."""
    key = hashlib.sha256(repr((FLAGS, _environment())).encode()).hexdigest()[:32]
    header = FOLDER / f"standard-{key}" / "standard.h"
    if not header.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            made = Path(folder) / "made"
            made.mkdir()
            shutil.copy(HERE / header.name, made)
            _run(["-x", "c++-header", str(made / header.name), "-o", str(made / "standard.h.gch")], header.name)
            with contextlib.suppress(OSError):  # another process was faster
                os.replace(made, header.parent)
    return header


def _library(main: str, kernel: str, options: list[str], name: str) -> Path:
    """A shared library of the file `main` of this folder, which includes the text of a kernel; `name` is the kernel's.

    Raises:
        RuntimeError: the compiler's messages.
    """
    key = hashlib.sha256(repr((main, kernel, options, FLAGS, _environment())).encode()).hexdigest()[:32]
    path = FOLDER / f"{name}-{key}.so"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            text, made = Path(folder) / "kernel.cu", Path(folder) / "library.so"
            text.write_text(kernel)
            files = [f'-DKERNEL_FILE="{text}"', f"-I{HERE}", str(HERE / main), "-o", str(made)]
            _run(["-shared", *options, *files], name)
            os.replace(made, path)  # whole or not at all, for whoever else looks
    return path


def _run(options: list[str], name: str) -> None:
    """The compiler, on what is called `name` in messages.

    Raises:
        RuntimeError: its messages.
    """
    done = subprocess.run([COMPILER, *FLAGS, *options], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name} does not compile with {COMPILER}:\n{done.stderr[:8000]}")


@cache
def _environment() -> tuple[str, ...]:
    """What libraries depend on beside their own source: the machine's files, the compiler, the CPU."""
    files = sorted(p for p in HERE.rglob("*") if p.suffix in (".h", ".cpp", ".cuh"))
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True).stdout
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    return (*(p.read_text() for p in files), version, *cpu[:1])
