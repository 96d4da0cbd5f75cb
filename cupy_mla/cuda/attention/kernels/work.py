"""How much work the CTAs of a launch do that all run at a time or in rounds, by what takes time in it.

`times` has what each takes on a GPU. Where CTAs fill the GPU, its memory makes them slower: that is `load`, which counts
CTAs of the last round by the share of the GPU that they fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

Work = tuple[str, dict[str, float]]  # what it is called in `times`, and amounts by name


def rounds_of(ctas: int, at_once: int) -> float:
    """Rounds in which a GPU runs so many CTAs or clusters; no end of them where it runs none, as a part of a GPU (MIG)
    or one whose GPCs have few SMs."""
    return -(-ctas // at_once) if at_once else inf


def whole(items: int, pairs: float, sms: int, shared: bool = False) -> dict[str, float]:
    """Work items of so many pairs of tiles, one CTA each.

    Args:
        shared: several CTAs read the same rows.
    """
    share = items / sms
    rounds = -(-items // sms)
    load = rounds - 1 + (share - rounds + 1) ** 2
    return {
        "launch": 1, "items": rounds, "pairs": rounds * pairs, "load": load,
        "shared pairs at load" if shared else "pairs at load": load * pairs,
    }  # fmt: skip


def split(ctas: int, splits: int, pairs: float, sms: int, shared: bool = False) -> dict[str, float]:
    """Splits of so many pairs of tiles, one CTA each, which all run at a time and are merged."""
    load = min(1.0, ctas / sms)
    return {
        "launch": 1, "splits": splits, "pairs": pairs, "load": load,
        "shared pairs at load" if shared else "pairs at load": load * pairs,
    }  # fmt: skip


def shares(items: int, pairs: float, ctas: int) -> dict[str, float]:
    """Equal shares of work items of so many pairs of tiles."""
    share = items / ctas
    return {
        "launch": 1, "items": share, "pairs": share * pairs, "partial results": max(0.0, 1 / share - 1) if items else 0
    }  # fmt: skip


def fitting(splits: Sequence[int], ctas: int, at_once: Sequence[int], most: int) -> list[int]:
    """The largest `most` numbers of splits whose clusters all run at a time, for so many CTAs unsplit."""
    return [n for n in splits if n <= len(at_once) and ctas <= at_once[n - 1]][-most:]
