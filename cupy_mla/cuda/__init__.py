"""The operations as launchers of CUDA kernels that are compiled at run time.

Nothing here imports CuPy before it is needed.
"""

from __future__ import annotations

import importlib
import pkgutil

from .jit import Kernel


def all_kernels() -> list[Kernel]:
    """Every kernel variant of the package: what the `kernels` function of every launcher module lists."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    listed = [kernel for module in modules if hasattr(module, "kernels") for kernel in module.kernels()]
    return list(dict.fromkeys(listed))  # once each: a module may list those of another that it chooses among
