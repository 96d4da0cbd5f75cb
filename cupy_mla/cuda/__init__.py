"""The operations as launchers: each takes a GPU and the checked arguments of a call, and returns a `Program`.

Nothing here imports CuPy before it is needed.
"""

from __future__ import annotations

import importlib
import pkgutil

from .kernel import Kernel


def all_kernels() -> list[Kernel]:
    """Every kernel variant of the package: what the `kernels` function of every launcher module lists."""
    names = [module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    listed = [kernel for module in modules if callable(getattr(module, "kernels", None)) for kernel in module.kernels()]
    return list(dict.fromkeys(listed))  # once each: a module may list those of another that it launches
