"""The operations as launchers of CUDA kernels that are compiled at run time.

Nothing here imports CuPy before it is needed.
"""

from __future__ import annotations

import importlib
import pkgutil

from .jit import LEAST_ARCH, Kernel


def all_kernels() -> list[Kernel]:
    """Every kernel variant of the package: what the `kernels` function of every launcher module lists."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    listed = [kernel for module in modules if hasattr(module, "kernels") for kernel in module.kernels()]
    return list(dict.fromkeys(listed))  # once each: a module may list those of another that it chooses among


def suits(kernel: Kernel, capability: int) -> bool:
    """Whether a kernel runs on a GPU of this compute capability (times 10)."""
    if kernel.target is None:
        return capability >= LEAST_ARCH
    return capability == int(kernel.target.rstrip("a"))  # "a": that generation alone


def load(kernel: Kernel, device: int) -> None:
    """Compile (or take from CuPy's disk cache) and load a kernel ahead of its first launch.

    Safe from several threads, and from several processes: CuPy's disk cache writes a file of its own and renames it,
    and checks a hash when it reads.

    Raises:
        RuntimeError: the GPU is too old, or NVRTC is missing.
    """
    kernel._load(device)


def loaded(kernel: Kernel, device: int) -> bool:
    """Whether a kernel is ready to be launched on a device."""
    return device in kernel._functions
