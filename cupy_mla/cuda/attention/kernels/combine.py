"""`kernels_cu/attention/combine.cu`: merges the partial results of a query's splits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ....layouts import D_V
from ... import structs
from ...kernel import Kernel
from ...program import Launch
from ...structs import Packed
from ..problem import Problem


@cache
def kernel(half: bool = False) -> Kernel:
    """The kernel; `half`: results are float16, not bfloat16."""
    return Kernel("attention/combine.cu", structs.ATTENTION, {"D_V": D_V, "HALF_ITEMS": int(half)}, overlaps=True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield kernel()
    yield kernel(True)


def launch(problem: Problem, params: Packed) -> Launch:
    """The launch behind one that left partial results."""
    return Launch(kernel(True) if problem.layout.half else kernel(), (problem.queries, problem.heads, 1), params)
