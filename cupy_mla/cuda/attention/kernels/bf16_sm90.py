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
from .lists import counted, longest_first
from .work import whole

HEADS = 64
COUNTED_ROUNDS = 8  # of work items, from which on looking for the ends of lists takes less than 1 % of the time
LAYOUTS = (BF16_576, BF16_512)  # that the kernels for flat bf16 rows can read
SPILL_BYTES = 36  # a few words of the producer, once a work item


def defines(layout: Layout) -> dict[str, int | str]:
    """The constants of this kernel and its relatives."""
    return {**layout.defines(), "D_V": D_V, "HEADS": HEADS, "TILE_ROWS": TILE_ROWS}


@cache
def kernel(layout: Layout) -> Kernel:
    """The kernel for rows of one width."""
    return Kernel(
        "attention/bf16_sm90.cu", structs.ATTENTION, defines(layout), archs=("90a",), target="90a",
        spill_bytes=SPILL_BYTES, overlaps=True,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in LAYOUTS:
        yield kernel(layout)


def serves(problem: Problem) -> bool:
    """Flat bf16 rows, unsplit."""
    flat = problem.flat and problem.layout in LAYOUTS
    return problem.on_hopper and flat and not problem.fixed and problem.num_splits <= 1


def candidates(problem: Problem) -> Iterator[Division]:
    """Whole items."""
    counts = problem.prefill and not problem.uneven
    yield Whole(HEADS, counted=counts and problem.items(HEADS) >= COUNTED_ROUNDS * problem.gpu.sms)


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for a division of a kind that it has."""
    counts = not division.counted or (problem.prefill and not problem.uneven)
    return division.heads == HEADS and division.queries == 1 and counts


def work(problem: Problem, division: Any) -> Work:
    """What takes time in a division, see `work.py`."""
    counted = whole(problem, problem.items(HEADS), problem.pairs, problem.heads > HEADS)
    return ("whole", problem.phase, problem.lists), *counted


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch: CTAs that take work items in turn, those of the longest lists first."""
    first, params = None, call.params
    if division.counted:
        first, params = counted(problem, params)
    elif problem.uneven and problem.items(HEADS) > problem.gpu.sms:
        first, params = longest_first(problem, params)
    launch = Launch(kernel(problem.layout), (division.grid(problem), 1, 1), params)
    return [first, launch] if first else [launch]
