"""`kernels_cu/attention/combine.cu`: merges the partial results of a query's splits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ....layouts import D_V
from ... import structs
from ...kernel import Kernel
from ...program import Launch
from ...structs import Packed
from ..problem import Problem


@lru_cache(maxsize=1)
def kernel() -> Kernel:
    """The kernel; it does not depend on the layout."""
    return Kernel("attention/combine.cu", structs.ATTENTION, {"D_V": D_V}, overlaps=True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield kernel()


def launch(problem: Problem, params: Packed) -> Launch:
    """The launch behind one that left partial results."""
    return Launch(kernel(), (problem.queries, problem.heads, 1), params)
