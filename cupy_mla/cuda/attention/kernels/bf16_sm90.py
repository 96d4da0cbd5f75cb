"""`kernels_cu/attention/bf16_sm90.cu`: flat bf16 rows on Hopper, 64 heads of a query at a time, whole queries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ....layouts import BF16_512, BF16_576, D_V, Layout
from ... import structs
from ...kernel import Kernel
from ...program import Launch, Program
from ..call import Call
from ..divide import Division, Whole
from ..problem import TILE_ROWS, Problem
from ..times import Work
from .lists import longest_first
from .work import whole

HEADS = 64
LAYOUTS = (BF16_576, BF16_512)  # the kernels for flat bf16 rows can read these
SPILL_BYTES = 36  # a few words of the producer, once a work item


def defines(layout: Layout) -> dict[str, int | str]:
    """The constants of this kernel, and of others for bf16 rows and for dense attention."""
    return {**layout.defines(), "D_V": D_V, "HEADS": HEADS, "TILE_ROWS": TILE_ROWS}


@cache
def kernel(layout: Layout) -> Kernel:
    """The kernel for rows of one width."""
    return Kernel(
        "attention/bf16_sm90.cu", structs.ATTENTION, defines(layout), archs=("90a",),
        spill_bytes=SPILL_BYTES, overlaps=True,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in LAYOUTS:
        yield kernel(layout)


def serves(problem: Problem) -> bool:
    """Flat bf16 rows, unsplit."""
    flat = problem.flat and problem.layout in LAYOUTS
    return problem.on_hopper and flat and not problem.fixed_kernel and problem.num_splits <= 1


def candidates(problem: Problem) -> Iterator[Division]:
    """Whole items."""
    yield Whole(HEADS)


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    return bool(division == Whole(HEADS))


def work(problem: Problem, division: Any) -> Work:
    """The work of a division, see `work.py`."""
    words = "whole", problem.phase, problem.lists
    return words, *whole(problem, problem.items(HEADS), problem.pairs, problem.heads > HEADS)


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch: CTAs that take work items in turn, those of the longest lists first."""
    order, params = None, call.packed()
    if problem.uneven and problem.items(HEADS) > problem.gpu.sms:
        order, params = longest_first(problem, params)
    launch = Launch(kernel(problem.layout), (division.grid(problem), 1, 1), params)
    return [order, launch] if order else [launch]
