"""The work of a launch as amounts: what takes time in it, and how much of each there is.

`times` says what a unit of each takes on a GPU, and the time of the launch is the sum of the products. CTAs are slower
the more of them run, because they share the GPU's memory. The amounts of `load` stand for that: they count by how much
of the GPU is busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from math import inf
from operator import ge

from ..divide import split_numbers
from ..problem import DenseProblem, Problem

Amounts = tuple[float, ...]
Counted = tuple[tuple[str, ...], Amounts]  # what takes time, and how much of it there is


def own_and_shared(names: tuple[str, ...], *reads: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of amounts: where each CTA reads rows of its own, and where several read the same rows. `reads` are the
    amounts that take another time there."""
    return names, tuple(f"shared {name}" if name in reads else name for name in names)


WHOLE = own_and_shared(
    ("launch", "items", "pairs", "pairs of later rounds", "mean pairs", "load", "pairs at load"), "pairs at load"
)
SPLIT = own_and_shared(("launch", "splits", "pairs", "load", "pairs at load"), "pairs at load")
SHARES = own_and_shared(("launch", "items", "pairs", "partial results"), "pairs")


def rounds_of(ctas: int, at_once: int) -> float:
    """Rounds in which a GPU runs so many CTAs or clusters, of which `at_once` run at a time.

    Infinite where none can run: large clusters do not fit a part of a GPU (MIG), or GPCs with few SMs.
    """
    return -(-ctas // at_once) if at_once else inf


def longest(problem: Problem | DenseProblem) -> float:
    """The length of the longest list, as a part of the entries that a list may have. Of lists with lengths it is the
    mean for random lengths."""
    if isinstance(problem, DenseProblem):  # lengths are on the device: all count as the table allows
        return 1.0
    return problem.queries / (problem.queries + 1) if problem.uneven else 1.0


def whole(problem: Problem | DenseProblem, items: int, pairs: float, shared: bool = False) -> Counted:
    """Work items of so many pairs of tiles, one CTA each, in rounds.

    Args:
        shared: several CTAs read the same rows.
    """
    share = items / problem.gpu.sms
    rounds = -(-items // problem.gpu.sms)
    load = rounds - 1 + (share - rounds + 1) ** 2  # the last round may leave SMs idle
    amounts = 1, rounds, pairs * longest(problem), (rounds - 1) * pairs, share * pairs, load, load * pairs
    return WHOLE[shared], amounts


def split(problem: Problem | DenseProblem, ctas: int, splits: float, pairs: float, shared: bool = False) -> Counted:
    """Splits of so many pairs of tiles, one CTA each. All run at a time, and their results are merged."""
    load = min(1.0, ctas / problem.gpu.sms)
    return SPLIT[shared], (1, splits, pairs * longest(problem), load, load * pairs)


def in_rounds(amounts: Amounts, rounds: float) -> Amounts:
    """Amounts of work that runs at a time, repeated for each round."""
    return tuple(rounds * amount for amount in amounts) if rounds > 1 else amounts


def shares(problem: Problem, items: int, shared: bool = False) -> Counted:
    """Equal shares of work items."""
    share = items / problem.gpu.sms
    return SHARES[shared], (1, share, share * problem.pairs, max(0.0, 1 / share - 1) if items else 0)


def cluster_splits(problem: Problem, items: int, parts: int, at_once: Sequence[int]) -> list[int]:
    """The numbers of splits that may be the fastest, each item's in one cluster, with all clusters running at a time:
    the two largest of `split_numbers`, and for unequal lists the largest that is possible. Measured, no smaller number
    was the fastest.

    Args:
        parts: tiles or pairs of tiles of an item.
        at_once: how many clusters of 1, 2, ... CTAs run at a time.
    """
    most = sum(map(ge, at_once[:parts], repeat(items)))  # larger clusters run in smaller numbers
    found = [*split_numbers(parts, most)[-2:]]
    return [*found, most] if problem.uneven and most > 1 and found[-1:] != [most] else found
