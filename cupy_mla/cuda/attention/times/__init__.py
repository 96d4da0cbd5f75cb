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
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from math import inf
from operator import mul
from types import ModuleType

from ...driver import Gpu
from ..problem import Problem

# What a kind of work is called, by words and numbers of which some are ""; names of amounts; and these.
Words = tuple[str | int, ...]
Work = tuple[Words, tuple[str, ...], Sequence[float]]

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


@cache
def each(gpu: Gpu, kernel: str, words: Words, names: tuple[str, ...]) -> tuple[float, ...]:
    """What each amount of work of these names takes, of which some take no time."""
    known = of(gpu).TIMES[kernel][text_of(words)]
    return tuple(known.get(name, 0.0) for name in names)


def text_of(words: Words) -> str:
    """What TIMES call a kind of work."""
    return " ".join(str(word) for word in words if word != "")


def microseconds(gpu: Gpu, kernel: str, work: Work) -> float:
    """How long work takes; without end where a GPU never has done it."""
    words, names, amounts = work
    return inf if inf in amounts else sum(map(mul, each(gpu, kernel, words, names), amounts))
