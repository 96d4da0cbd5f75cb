"""What work takes on a GPU, in microseconds: data that `benchmarks/fit_times.py` writes from the records.

A module is named as a part of the name of the GPU that it is for. It has

    TIMES        by kernel and kind of work: what each amount takes (`kernels/work.py`)
    EXCEPTIONS   by call: factors on the times of candidates that TIMES would choose though faster ones were measured

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


Size = tuple[str, int, bool, bool, int, int, int, int]


def size_of(problem: Problem) -> Size:
    """A call as a key of EXCEPTIONS."""
    return (
        problem.layout.name, problem.layout.d_qk, problem.prefill, problem.uneven, problem.heads, problem.queries,
        problem.entries, problem.extra_entries,
    )  # fmt: skip


def exceptions(problem: Problem) -> dict[str, float]:
    """Factors on the times of candidates of a call, by their text."""
    return of(problem.gpu).EXCEPTIONS.get(size_of(problem), {})


@cache
def each(gpu: Gpu, kernel: str, words: Words, names: tuple[str, ...]) -> tuple[float, ...]:
    """What a unit of each of these amounts of work takes; 0 of one that takes no time."""
    known = of(gpu).TIMES[kernel][text_of(words)]
    return tuple(known.get(name, 0.0) for name in names)


def text_of(words: Words) -> str:
    """A kind of work as a key of TIMES."""
    return " ".join(str(word) for word in words if word != "")


def microseconds(gpu: Gpu, kernel: str, work: Work) -> float:
    """How long work takes; inf where the GPU can never do it."""
    words, names, amounts = work
    return inf if inf in amounts else sum(map(mul, each(gpu, kernel, words, names), amounts))
