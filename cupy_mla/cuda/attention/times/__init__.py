"""What work takes on a GPU, in microseconds: data that `benchmarks/fit_times.py` writes from the records.

A module is named as a part of the name of the GPU that it is for. It has

    TIMES        by kernel and kind of work: what each amount takes (`kernels/work.py`)
    EXCEPTIONS   calls for which TIMES would choose a slower candidate than the fastest one that was measured: by what
                 its time is to be multiplied there

A GPU without a module has the times of `NEAREST`: it runs the portable kernel alone, or the kernels for Hopper, whose
divisions compare on any GPU of that kind as on this one.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType

from ...driver import Gpu
from ..problem import Problem

NEAREST = "h200"


@cache
def of(gpu: Gpu) -> ModuleType:
    """The module for a GPU."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    name = next((name for name in names if name.upper() in gpu.name.upper()), NEAREST)
    return import_module(f"{__name__}.{name}")


def size_of(problem: Problem) -> tuple[str, bool, bool, int, int, int, int]:
    """What EXCEPTIONS know a call by."""
    return (
        problem.layout.name, problem.prefill, problem.uneven, problem.heads, problem.queries, problem.entries,
        problem.extra_entries,
    )  # fmt: skip


def exceptions(problem: Problem) -> dict[str, float]:
    """By what times of candidates are to be multiplied, by their text."""
    return of(problem.gpu).EXCEPTIONS.get(size_of(problem), {})


def microseconds(each: dict[str, float], amounts: dict[str, float]) -> float:
    """How long amounts of work take, of which some take no time."""
    us = 0.0
    for name, amount in amounts.items():
        if name in each:
            us += amount * each[name]
    return us
