"""Compiled kernels, shared between tests, processes and runs.

What NVRTC made of a source lies on disk under a hash of all that it depends on. Delete `.pytest_cache/kernels` to have
all compiled anew.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import tempfile
import time
from base64 import b64decode, b64encode
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from cupy_mla.cuda.kernel import Kernel, kernels_root

FOLDER = Path(__file__).resolve().parent.parent / ".pytest_cache" / "kernels"
KEPT_SECONDS = 14 * 24 * 3600  # results that no run asked for in this time are deleted

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cupy_backends") is None, reason="needs CuPy and NVRTC (extra cuda12 or cuda13)"
)


class Compiled(NamedTuple):
    """A kernel for one architecture: its cubin, and ptxas' report."""

    cubin: bytes
    report: str


def compile_kernel(kernel: Kernel, arch: str) -> Compiled:
    """`kernel.compile(arch)`, or what it gave before for the same source, options and compiler.

    Raises:
        RuntimeError: NVRTC's messages. They are not kept.
    """
    path = FOLDER / f"{_key(kernel, arch)}.json"
    try:
        known = json.loads(path.read_text())
        os.utime(path)
        return Compiled(b64decode(known["cubin"]), known["report"])
    except FileNotFoundError:
        compiled = Compiled(*kernel.compile(arch))
    FOLDER.mkdir(parents=True, exist_ok=True)
    _delete_old()
    with tempfile.NamedTemporaryFile("w", dir=FOLDER, suffix=".new", delete=False) as file:
        json.dump({"cubin": b64encode(compiled.cubin).decode(), "report": compiled.report}, file)
    os.replace(file.name, path)  # whole or not at all, for whoever else looks
    return compiled


@cache
def kernels_hash() -> str:
    """Of all text in kernels_cu."""
    sources = sorted(path for path in kernels_root().rglob("*") if path.suffix in (".cu", ".cuh"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _key(kernel: Kernel, arch: str) -> str:
    facts = (kernel.file, kernel.source, arch, inspect.getsource(Kernel.compile), _nvrtc())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


@cache
def _nvrtc() -> tuple[object, ...]:
    """The compiler's version, and its file, which tells builds of one version apart."""
    from importlib.metadata import PackageNotFoundError, version

    from cupy.cuda import nvrtc

    found: list[object] = [nvrtc.getVersion()]
    for name in ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"):
        try:
            found.append(version(name))
        except PackageNotFoundError:
            found.append(None)
    return tuple(found)


@cache
def _delete_old() -> None:
    """Once a process."""
    for path in FOLDER.iterdir():
        try:
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()
        except FileNotFoundError:  # another process was faster
            continue
