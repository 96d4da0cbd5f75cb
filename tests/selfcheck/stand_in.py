"""NumPy in the place of CuPy, and Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import cupy_mla

ROOT = Path(cupy_mla.__file__).parents[1]
RUN = "import sys; from cupy_mla.__main__ import main; sys.exit(main({}))"


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    whole = os.environ | {"PYTHONPATH": path} | env
    return subprocess.run([sys.executable, "-c", code], env=whole, capture_output=True, text=True)


def asarray(array: np.ndarray) -> np.ndarray:
    """As CuPy's, which has no fp8."""
    if array.dtype.name.startswith("float8"):
        raise ValueError(f"Unsupported dtype {array.dtype}")
    return np.asarray(array)


class StandIn(SimpleNamespace):
    """NumPy in the place of CuPy, with one GPU of compute capability 9.0."""

    def __init__(self, **more: object) -> None:
        runtime = SimpleNamespace(
            driverGetVersion=lambda: 13000,
            getDeviceCount=lambda: 1,
            getDeviceProperties=lambda device: {"name": b"stand-in"},
        )
        device = type("Device", (nullcontext,), {"synchronize": lambda self: None})
        functions = {"asarray": asarray, "zeros": np.zeros, "full": np.full, "broadcast_to": np.broadcast_to}
        pool = SimpleNamespace(malloc=None)
        cuda = SimpleNamespace(runtime=runtime, Device=device, MemoryPool=lambda: pool, using_allocator=nullcontext)
        super().__init__(cuda=cuda, **{**functions, **more})
