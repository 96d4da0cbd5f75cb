"""`kernels_cu/attention/fp8_short_sm90.cu`: V4_FP8 rows on Hopper, 32 or 64 heads of a query at a time, short lists."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ....layouts import V4_FP8
from ... import structs
from ...kernel import Kernel
from ...paging import ceil_div
from ...program import Launch, Program
from ..call import Call
from ..divide import Division, Whole
from ..problem import Problem
from ..times import Work
from . import fp8_sm90
from .work import whole

HEADS = (32, 64)  # heads a CTA is built for
TILES = 4  # of 64 rows: a CTA holds all of a query, as kernels_cu/attention/fp8_short_sm90.cu says


@cache
def kernel(heads: int) -> Kernel:
    """The kernel for so many heads of a CTA."""
    made = fp8_sm90.defines(V4_FP8, heads, fp8_sm90.WHOLE)
    return Kernel("attention/fp8_short_sm90.cu", structs.ATTENTION, made, archs=("90a",), overlaps=True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield from map(kernel, HEADS)


def serves(problem: Problem) -> bool:
    """Decode over V4_FP8 rows in all caches, unsplit and not batch-invariant."""
    able = problem.on_hopper and problem.layout == V4_FP8 and problem.extra_layout in (None, V4_FP8)
    return able and not problem.prefill and not problem.fixed_kernel and problem.num_splits <= 1


def candidates(problem: Problem) -> Iterator[Division]:
    """Whole items, where the lists are short enough. Up to 16 heads are faster on `fp8_sm90`."""
    if problem.tiles <= TILES and (problem.heads > 16 or problem.forced):
        yield from map(Whole, HEADS if problem.heads > min(HEADS) or problem.forced else HEADS[:1])


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    return problem.tiles <= TILES and division in map(Whole, HEADS)


def work(problem: Problem, division: Any) -> Work:
    """The work of a division, see `work.py`."""
    heads = division.heads
    counted = whole(problem, problem.items(heads), problem.tiles / 2, problem.heads > heads)
    return (problem.layout.name, "whole", heads, problem.lists), *counted


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch: for each tile of heads CTAs that take queries in turn."""
    tiles = ceil_div(problem.heads, division.heads)
    ctas = min(problem.queries, max(problem.gpu.sms // tiles, 1))
    params = call.packed(num_splits=1, **call.end_fields())
    return [Launch(kernel(division.heads), (tiles, ctas, 1), params)]
