"""The portable kernel in its shape for GPUs with 99 KB of shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...program import Program
from ..call import Call
from ..divide import Division
from ..problem import Problem
from ..times import Work
from . import portable


def serves(problem: Problem) -> bool:
    """Any call that no other kernel serves."""
    return problem.forced or not (problem.gpu.shared_kb >= portable.LARGE or portable.on_hopper(problem))


def candidates(problem: Problem) -> Iterator[Division]:
    """Those of `portable`."""
    return portable.candidates(problem)


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    return portable.fits(problem, division)


def work(problem: Problem, division: Any) -> Work:
    """The work of a division."""
    return (portable.SMALL, "KB"), *portable.counted(problem, division)


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch."""
    return portable.program(problem, division, call, portable.SMALL)
