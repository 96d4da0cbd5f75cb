"""`kernels_cu/attention/dense_fp8_sm90.cu`: dense decode over FP8 rows on Hopper, 16, 32 or 64 lines an item."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ....layouts import V32_NOPE_FP8, Layout
from ... import structs
from ...driver import MAX_CLUSTER
from ...kernel import Kernel
from ...program import Launch, Plan, Program
from ...structs import Packed
from ..divide import Clusters, Division, Shares, Whole
from ..problem import DenseProblem
from ..times import Work
from . import dense_combine, fp8_sm90
from .dense_cluster_sm90 import clusters, in_clusters, largest
from .work import whole

LAYOUTS = fp8_sm90.LAYOUTS_OF_FP8
LINES = fp8_sm90.HEADS  # query tokens times heads
DIVISIONS = {Whole: 0, Clusters: 1, Shares: 5}  # numbers of kernels_cu/attention/division/division.cuh
MOST_PAIRS = 16  # pairs of tiles of a whole request; see `dense_cluster_sm90.MOST_PAIRS`
SPILL_BYTES = {V32_NOPE_FP8: 4}  # an address


@cache
def kernel(layout: Layout, lines: int, division: int) -> Kernel:
    """The kernel for one cache layout, lines of a work item, and a division's number."""
    defines = fp8_sm90.defines(layout, lines, division, dense=True)
    return Kernel(
        "attention/dense_fp8_sm90.cu", structs.DENSE, defines, archs=("90a",),
        spill_bytes=SPILL_BYTES.get(layout, 0),
        max_cluster=MAX_CLUSTER if division == DIVISIONS[Clusters] else 1, overlaps=True,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in LAYOUTS:
        for lines in LINES:
            for division in DIVISIONS.values():
                yield kernel(layout, lines, division)


def serves(problem: DenseProblem) -> bool:
    """Aligned FP8 rows on Hopper."""
    return problem.on_hopper and problem.layout in LAYOUTS


def candidates(problem: DenseProblem) -> Iterator[Division]:
    """Shares, whole requests and clusters, with each number of lines that may be the fastest."""
    few = [lines for lines in LINES if problem.lines <= lines]
    if problem.batch_invariant:  # the choice may depend on lines alone
        yield from dense_combine.candidates(problem, (*few, max(LINES))[0])
        return
    for lines in LINES if problem.division else fp8_sm90.cta_heads(problem.lines):
        yield from dense_combine.candidates(problem, lines)
        if problem.num_splits <= 1 and (problem.forced or problem.num_splits or problem.pairs <= MOST_PAIRS):
            yield Whole(lines)
        if problem.num_splits != 1:
            yield from largest(problem, lines, LINES)


def fits(problem: DenseProblem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    if division.heads not in LINES:
        return False
    if isinstance(division, Clusters):
        return division.fits and division.splits == division.cluster > 1
    if isinstance(division, Shares):
        return dense_combine.fits(division)
    return bool(division == Whole(division.heads))


def work(problem: DenseProblem, division: Any) -> Work:
    """The work of a division, see `work.py`."""
    lines = division.heads
    rows = "plain" if problem.layout.scale_of_call else ""
    if isinstance(division, Shares):
        return (rows, dense_combine.kind_of(division), lines), *dense_combine.counted(problem, division)
    if isinstance(division, Clusters):
        return (rows, "clusters", lines), *clusters(problem, division)
    return (rows, "whole", lines), *whole(problem, problem.items(lines), problem.pairs, problem.lines > lines)


def launches(problem: DenseProblem, division: Any, params: Packed, plan: Plan | None) -> Program:
    """The launch; after that of shares a second one merges the items that are cut."""
    lines = division.heads
    attention = kernel(problem.layout, lines, DIVISIONS[type(division)])
    if isinstance(division, Shares):
        merge = dense_combine.kernel(lines, True, False)
        return dense_combine.in_shares(attention, merge, problem, params, division, plan)
    if isinstance(division, Clusters):
        return in_clusters(attention, problem, params, division)
    return [Launch(attention, (min(problem.items(lines), problem.gpu.sms), 1, 1), params)]
