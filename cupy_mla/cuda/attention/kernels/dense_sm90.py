"""`kernels_cu/attention/dense_sm90.cu`: dense decode over bf16 and float16 rows on Hopper, all rows in equal shares."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ....layouts import Layout
from ... import structs
from ...kernel import Kernel
from ...program import Plan, Program
from ...structs import Packed
from ..divide import CUT_COST, Division, Shares
from ..problem import DenseProblem
from ..times import Work
from . import bf16_sm90, dense_combine
from .dense_cluster_sm90 import LAYOUTS

LINES = bf16_sm90.HEADS  # of a work item: query tokens times heads
UNEVEN_ITEM_COST = 8  # what an item costs beside its pairs, in eighths of a pair of tiles


@cache
def kernel(layout: Layout) -> Kernel:
    """The kernel for rows of one width."""
    defines = {**bf16_sm90.defines(layout), "UNEVEN_ITEM_COST": UNEVEN_ITEM_COST}
    return Kernel("attention/dense_sm90.cu", structs.DENSE, defines, archs=("90a",), overlaps=True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in LAYOUTS:
        yield kernel(layout)


def serves(problem: DenseProblem) -> bool:
    """Aligned bf16 and float16 rows on Hopper."""
    return problem.on_hopper and problem.layout in LAYOUTS


def candidates(problem: DenseProblem) -> Iterator[Division]:
    """Equal shares of all rows, or equal splits of each item."""
    yield from dense_combine.candidates(problem, LINES)


def fits(problem: DenseProblem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    return division.heads == LINES and dense_combine.fits(division)


def work(problem: DenseProblem, division: Any) -> Work:
    """The work of a division, see `dense_combine.counted`."""
    return (dense_combine.kind_of(division),), *dense_combine.counted(problem, division)


def launches(problem: DenseProblem, division: Any, params: Packed, plan: Plan | None) -> Program:
    """The launch, a share a CTA, and the merge of items that are cut."""
    merge = dense_combine.kernel(LINES, False, problem.layout.half)
    cost = cut_cost(problem, division)
    return dense_combine.in_shares(kernel(problem.layout), merge, problem, params, division, plan, cost)


def cut_cost(problem: DenseProblem, division: Shares) -> int:
    """What a share costs more where items are cut, in eighths of a pair of tiles.

    Cut items take longer a pair than whole ones, the more so the more lines they have. So items of about equal lengths
    stay whole though some SMs then have no item. Where half of the SMs would have none, cutting items is faster.
    """
    if 2 * problem.items(LINES) <= dense_combine.shares_of(problem, division):
        return CUT_COST
    return max(CUT_COST, 14 + min(problem.lines, LINES) // 2)
