"""The portable kernel of dense attention in its shape for GPUs with 99 KB of shared memory."""

from __future__ import annotations

from math import inf

from ...program import Plan, Program
from ...structs import Packed
from ..problem import DenseProblem
from . import dense_portable, portable


def serves(problem: DenseProblem) -> bool:
    """Any call."""
    return True


def us(problem: DenseProblem) -> float:
    """Longer than any kernel that is made for one GPU."""
    return inf


def launches(problem: DenseProblem, params: Packed, plan: Plan | None) -> Program:
    """The launch."""
    return dense_portable.launched(problem, params, "portable_99kb", portable.SMALL)
