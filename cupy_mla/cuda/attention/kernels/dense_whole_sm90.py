"""`kernels_cu/attention/dense_whole_sm90.cu`: dense decode over bf16 and float16 rows on Hopper, whole requests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ....layouts import Layout
from ... import structs
from ...kernel import Kernel
from ...program import Launch, Plan, Program
from ...structs import Packed
from ..divide import Division, Whole
from ..problem import DenseProblem
from ..times import Work
from . import bf16_cluster_sm90, bf16_sm90
from .dense_cluster_sm90 import LAYOUTS
from .work import whole

LINES = bf16_cluster_sm90.HEADS  # of a work item: query tokens times heads
MOST_PAIRS = 16  # pairs of tiles of a whole request; see `dense_cluster_sm90.MOST_PAIRS`


@cache
def kernel(layout: Layout, lines: int) -> Kernel:
    """The kernel for rows of one width and so many lines a work item."""
    return Kernel(
        "attention/dense_whole_sm90.cu", structs.DENSE, {**bf16_sm90.defines(layout), "HEADS": lines}, archs=("90a",),
        overlaps=True,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in LAYOUTS:
        for lines in LINES:
            yield kernel(layout, lines)


def serves(problem: DenseProblem) -> bool:
    """Aligned bf16 and float16 rows on Hopper, unsplit."""
    able = problem.on_hopper and problem.layout in LAYOUTS
    return able and not problem.batch_invariant and problem.num_splits <= 1


def candidates(problem: DenseProblem) -> Iterator[Division]:
    """Whole requests of few rows. Items have 64 lines, or fewer where a request has no more or all items run at a
    time."""
    if problem.pairs > MOST_PAIRS and not (problem.forced or problem.num_splits):
        return
    for lines in LINES:
        padded = problem.lines <= lines // 2 and lines > min(LINES)
        fewer = not padded and (problem.lines <= lines or problem.items(lines) <= problem.gpu.sms)
        if fewer or lines == max(LINES):
            yield Whole(lines)


def fits(problem: DenseProblem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    return division.heads in LINES and bool(division == Whole(division.heads))


def work(problem: DenseProblem, division: Any) -> Work:
    """The work of a division, see `work.py`."""
    lines = division.heads
    return (lines,), *whole(problem, problem.items(lines), problem.pairs, problem.lines > lines)


def launches(problem: DenseProblem, division: Any, params: Packed, plan: Plan | None) -> Program:
    """The launch: CTAs that take work items in turn."""
    grid = (min(problem.items(division.heads), problem.gpu.sms), 1, 1)
    return [Launch(kernel(problem.layout, division.heads), grid, params)]
