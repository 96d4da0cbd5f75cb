"""`kernels_cu/attention/dense_sm90.cu`: dense decode over bf16 and float16 rows on Hopper, all rows in equal shares."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import ceil
from typing import Any

from ....layouts import Layout
from ... import structs
from ...kernel import Kernel
from ...paging import ceil_div
from ...program import Plan, Program
from ...structs import Packed
from ..divide import Division, Shares
from ..problem import DenseProblem
from ..times import Work
from . import bf16_sm90, dense_combine
from .dense_cluster_sm90 import LAYOUTS

LINES = bf16_sm90.HEADS  # of a work item: query tokens times heads
UNEVEN_ITEM_COST = 8  # what an item costs beside its pairs, in eighths of a pair of tiles
EVEN_SPLITS = 1  # whether items of about equal lengths may have equal splits, one a share
MOST_WHOLE = 8  # pairs of tiles of items that stay whole rather than having equal splits
SPLIT_CUT_COST = 8  # what a share costs more where items are cut anywhere, beside equal splits
# Where each row is read once, memory bounds: if some SMs have no share, the others read faster.
FASTER_READS = 15 / 16


@cache
def kernel(layout: Layout) -> Kernel:
    """The kernel for rows of one width."""
    defines = {**bf16_sm90.defines(layout), "UNEVEN_ITEM_COST": UNEVEN_ITEM_COST, "EVEN_SPLITS": EVEN_SPLITS}
    return Kernel("attention/dense_sm90.cu", structs.DENSE, defines, archs=("90a",), target="90a", overlaps=True)


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
    merge = dense_combine.kernel(half=problem.layout.half)
    fields = where_even(problem, division)
    return dense_combine.in_shares(kernel(problem.layout), merge, problem, params, division, plan, **fields)


def cut_cost(lines: int) -> int:
    """What a share costs more because items of so many lines are cut, beside whole ones, in eighths of a pair."""
    return max(24, 14 + lines // 2)


def where_even(problem: DenseProblem, division: Shares) -> dict[str, int]:
    """Fields of `struct DenseParams`: how items of about equal lengths are divided, and when they count as such."""
    items, shares = problem.items(LINES), dense_combine.shares_of(problem, division)
    splits = shares // items if EVEN_SPLITS and problem.pairs > MOST_WHOLE else 1
    whole = ceil_div(items, shares) * shares / max(1, splits)
    cost = cut_cost(min(problem.lines, LINES)) if splits <= 1 else SPLIT_CUT_COST
    return {
        "even_splits": max(1, splits), "cut_cost": shares * cost,
        "whole_items": ceil(whole * (FASTER_READS if problem.lines <= LINES else 1)),
    }  # fmt: skip
