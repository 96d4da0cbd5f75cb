"""How much work the CTAs of a launch do that all run at a time or in rounds, by what takes time in it.

`times` has what each takes on a GPU. Where CTAs fill the GPU, its memory makes them slower. That is `load`: it counts
CTAs of the last round by the share of the GPU that they fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ..divide import split_numbers
from ..problem import Problem

Work = tuple[str, dict[str, float]]  # what it is called in `times`, and amounts by name


def rounds_of(ctas: int, at_once: int) -> float:
    """Rounds in which a GPU runs so many CTAs or clusters; no end of them where it runs none, as a part of a GPU (MIG)
    or one whose GPCs have few SMs."""
    return -(-ctas // at_once) if at_once else inf


def longest(problem: Problem) -> float:
    """The longest of the lists, as a part of what a list may have: on average, where lengths are random."""
    return problem.queries / (problem.queries + 1) if problem.uneven else 1.0


def whole(problem: Problem, items: int, pairs: float, shared: bool = False) -> dict[str, float]:
    """Work items of so many pairs of tiles, one CTA each.

    Args:
        shared: several CTAs read the same rows.
    """
    share = items / problem.gpu.sms
    rounds = -(-items // problem.gpu.sms)
    load = rounds - 1 + (share - rounds + 1) ** 2
    return {
        "launch": 1, "items": rounds, "pairs": pairs * longest(problem), "pairs of later rounds": (rounds - 1) * pairs,
        "mean pairs": share * pairs, "load": load, "shared pairs at load" if shared else "pairs at load": load * pairs,
    }  # fmt: skip


def split(problem: Problem, ctas: int, splits: float, pairs: float, shared: bool = False) -> dict[str, float]:
    """Splits of so many pairs of tiles, one CTA each, which all run at a time and are merged."""
    load = min(1.0, ctas / problem.gpu.sms)
    return {
        "launch": 1, "splits": splits, "pairs": pairs * longest(problem), "load": load,
        "shared pairs at load" if shared else "pairs at load": load * pairs,
    }  # fmt: skip


def shares(problem: Problem, items: int, shared: bool = False) -> dict[str, float]:
    """Equal shares of work items."""
    share = items / problem.gpu.sms
    return {
        "launch": 1, "items": share, "shared pairs" if shared else "pairs": share * problem.pairs,
        "partial results": max(0.0, 1 / share - 1) if items else 0,
    }  # fmt: skip


def fitting(problem: Problem, items: int, parts: int, at_once: Sequence[int]) -> list[int]:
    """The two largest numbers of splits that are worth a look and whose clusters all run at a time, for lists of so
    many parts; where these are not equally long, the largest number of all, too. No smaller one was ever the fastest.
    """
    most = min(parts, len(at_once))
    while most > 1 and items > at_once[most - 1]:
        most -= 1
    found = [n for n in split_numbers(parts, most) if items <= at_once[n - 1]][-2:]
    return [*found, most] if problem.uneven and most > 1 and found[-1:] != [most] else found
