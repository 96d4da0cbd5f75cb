"""The portable kernel of dense attention in its shape for GPUs with 99 KB of shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...program import Plan, Program
from ...structs import Packed
from ..divide import Division
from ..problem import DenseProblem
from ..times import Work
from . import dense_portable, portable, portable_99kb


def serves(problem: DenseProblem) -> bool:
    """Any call that no other kernel serves."""
    return problem.forced or not (problem.gpu.shared_kb >= portable.LARGE or dense_portable.on_hopper(problem))


def candidates(problem: DenseProblem) -> Iterator[Division]:
    """See `dense_portable.divisions`."""
    yield from dense_portable.divisions(problem, "portable_99kb", portable_99kb.work)


def fits(problem: DenseProblem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    return dense_portable.fits(problem, division)


def work(problem: DenseProblem, division: Any) -> Work:
    """As `dense_portable.work`."""
    return dense_portable.work(problem, division)


def launches(problem: DenseProblem, division: Any, params: Packed, plan: Plan | None) -> Program:
    """The launch."""
    return dense_portable.program(problem, division, params, "portable_99kb", portable.SMALL)
