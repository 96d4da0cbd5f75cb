"""How long work takes on a GPU, in microseconds: data that `benchmarks/fit_times.py` writes from the records.

There is a module for each GPU; its name is a part of the GPU's. It has

    TIMES        by kernel and kind of work: what a unit of each amount of work takes (`kernels/work.py`)
    EXCEPTIONS   by call: factors on the times of candidates that TIMES prefers to others that were measured to be
        faster
    LISTS        of making index lists of slots: the launch, and each list

A GPU without a module has the times of `NEAREST`. If it is of another generation, the portable kernels alone serve it.
If it is a Hopper GPU, its candidates are taken to compare as on that one.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from math import inf
from operator import mul
from types import ModuleType

from ...driver import Gpu
from ..problem import Problem

# A kind of work, whose non-empty words make its name; what takes time in it; and how much of each there is.
Words = tuple[str | int, ...]
Work = tuple[Words, tuple[str, ...], Sequence[float]]

NEAREST = "h200"


@cache
def module_for(gpu: Gpu) -> ModuleType:
    """The module with the times of a GPU."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    name = next((name for name in names if name.upper() in gpu.name.upper()), NEAREST)
    return import_module(f"{__name__}.{name}")


Size = tuple[str, int, bool, bool, int, int, int, int]


def size_of(problem: Problem) -> Size:
    """A call as a key of EXCEPTIONS."""
    return (
        problem.layout.name, problem.layout.d_qk, problem.prefill, problem.uneven, problem.heads, problem.queries,
        problem.entries, problem.extra_entries,
    )  # fmt: skip


def exceptions(problem: Problem) -> dict[str, float]:
    """Factors on the times of candidates of a call, by their text."""
    return module_for(problem.gpu).EXCEPTIONS.get(size_of(problem), {})


@cache
def unit_times(gpu: Gpu, kernel: str, words: Words, names: tuple[str, ...]) -> tuple[float, ...]:
    """The time of a unit of each amount of work; 0 where none was fitted."""
    known = module_for(gpu).TIMES[kernel][name_of(words)]
    return tuple(known.get(name, 0.0) for name in names)


def name_of(words: Words) -> str:
    """A kind of work as a key of TIMES."""
    return " ".join(str(word) for word in words if word != "")


def lists_us(gpu: Gpu, lists: int) -> float:
    """How long it takes to make so many index lists of slots."""
    launch, each = module_for(gpu).LISTS
    return float(launch + each * lists)


def microseconds(gpu: Gpu, kernel: str, work: Work) -> float:
    """How long work takes; infinite where an amount of it is: the GPU cannot run it, or its time was never measured."""
    words, names, amounts = work
    return inf if inf in amounts else sum(map(mul, unit_times(gpu, kernel, words, names), amounts))
