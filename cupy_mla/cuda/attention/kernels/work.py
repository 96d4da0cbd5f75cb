"""How much work the CTAs of a launch do that all run at a time or in rounds, by what takes time in it.

`times` has what each takes on a GPU. Where CTAs fill the GPU, its memory makes them slower. That is `load`: it counts
CTAs of the last round by the share of the GPU that they fill.
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

# What takes time in each: where a CTA reads rows of its own, and where several read the same.
WHOLE, SPLIT, SHARES = (
    (names, (*names[:at], f"shared {names[at]}", *names[at + 1 :]))
    for at, names in (
        (6, ("launch", "items", "pairs", "pairs of later rounds", "mean pairs", "load", "pairs at load")),
        (4, ("launch", "splits", "pairs", "load", "pairs at load")),
        (2, ("launch", "items", "pairs", "partial results")),
    )
)


def rounds_of(ctas: int, at_once: int) -> float:
    """Rounds in which a GPU runs so many CTAs or clusters; inf where it runs none, as a part of a GPU (MIG) or one
    whose GPCs have few SMs."""
    return -(-ctas // at_once) if at_once else inf


def longest(problem: Problem | DenseProblem) -> float:
    """The length of the longest list, as a part of what a list may have: the mean of random lengths."""
    if isinstance(problem, DenseProblem):  # whose lengths nobody knows
        return 1.0
    return problem.queries / (problem.queries + 1) if problem.uneven else 1.0


def whole(problem: Problem | DenseProblem, items: int, pairs: float, shared: bool = False) -> Counted:
    """Work items of so many pairs of tiles, one CTA each.

    Args:
        shared: several CTAs read the same rows.
    """
    share = items / problem.gpu.sms
    rounds = -(-items // problem.gpu.sms)
    load = rounds - 1 + (share - rounds + 1) ** 2
    amounts = 1, rounds, pairs * longest(problem), (rounds - 1) * pairs, share * pairs, load, load * pairs
    return WHOLE[shared], amounts


def split(problem: Problem | DenseProblem, ctas: int, splits: float, pairs: float, shared: bool = False) -> Counted:
    """Splits of so many pairs of tiles, one CTA each, which all run at a time and are merged."""
    load = min(1.0, ctas / problem.gpu.sms)
    return SPLIT[shared], (1, splits, pairs * longest(problem), load, load * pairs)


def in_rounds(amounts: Amounts, rounds: float) -> Amounts:
    """The amounts of work that all runs at a time, if it is done in so many rounds."""
    return tuple(rounds * amount for amount in amounts) if rounds > 1 else amounts


def shares(problem: Problem, items: int, shared: bool = False) -> Counted:
    """Equal shares of work items."""
    share = items / problem.gpu.sms
    return SHARES[shared], (1, share, share * problem.pairs, max(0.0, 1 / share - 1) if items else 0)


def fitting(problem: Problem, items: int, parts: int, at_once: Sequence[int]) -> list[int]:
    """The two largest numbers of splits that are worth a look and whose clusters all run at a time, for lists of so
    many parts; where these are not equally long, the largest number of all, too. No smaller one was ever the fastest.
    """
    most = sum(map(ge, at_once[:parts], repeat(items)))  # the more CTAs a cluster has, the fewer run
    found = [*split_numbers(parts, most)[-2:]]
    return [*found, most] if problem.uneven and most > 1 and found[-1:] != [most] else found
