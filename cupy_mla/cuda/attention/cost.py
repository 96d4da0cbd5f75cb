"""How long a launch of an attention kernel takes on an H200, for `choose.py`: microseconds fitted to measurements.

A query's rows may be split, so that a small batch fills the GPU. The splits of a query are CTAs of a cluster, which
merges their results, or they leave partial results, which `combine.cu` merges, or both. A `Division` says how a launch
is divided; the cheapest one is chosen.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..driver import MAX_CLUSTER

MAX_SPLITS = 1024  # of a query's rows; each takes memory for a partial result
KNOWN_QUERIES = 512  # up to which all batches are decided at once: a server meets another one at every step


class Division(NamedTuple):
    """How a launch is divided.

    Attributes:
        heads: of a CTA.
        splits: of a query's rows.
        cluster: splits that the CTAs of a cluster merge; splits / cluster partial results are left for `combine.cu`.
    """

    heads: int
    splits: int
    cluster: int

    @property
    def partials(self) -> int:
        """Partial results of a query and head that are left for `combine.cu`; 1: none."""
        return self.splits // self.cluster


# Of `fp8_sm90`, fitted to 2048 rows, batch 1 to 64, by the heads of a CTA.
# CTA: Q, first rows and results of a CTA, and what is added when CTAs fill the GPU. PAIR: a pair of tiles. MERGE: a
# cluster's merge, and what is added when CTAs fill the GPU. COMBINE: the launch of combine.cu. PARTIAL: 1000 partial
# results in it.
FP8_CTA, FP8_PAIR = {32: (4.0, 6.0), 64: (7.0, 0.0)}, {32: 3.0, 64: 4.1}
FP8_MERGE = {32: (3.4, -3.0), 64: (3.5, 5.0)}
FP8_COMBINE, FP8_PARTIAL = 4.0, {32: 0.3, 64: 1.0}

# The same of `few_heads_sm90`. FULL: what is added when CTAs fill the GPU. TILE: a tile. ROUND: each consumer warpgroup
# takes a tile. MERGE: a cluster's merge, by the heads of a CTA.
FEW_CTA, FEW_FULL, FEW_TILE, FEW_ROUND = 2.9, 4.8, 1.2, 0.75
FEW_MERGE = {8: 3.3, 16: 3.3, 32: 5.0}
FEW_COMBINE, FEW_PARTIAL = 4.2, 1.0
FEW_CONSUMERS = {8: 3, 16: 3, 32: 2}  # consumer warpgroups of a CTA, by its heads


def _by_heads(values: dict[int, float]) -> np.ndarray:
    """Numbers that depend on the heads of a CTA, to be indexed by them."""
    found = np.zeros(max(values) + 1)
    found[list(values)] = list(values.values())
    return found


class Divisions(NamedTuple):
    """Many divisions, and what they are made of as arrays."""

    all: list[Division]
    heads: np.ndarray
    splits: np.ndarray
    cluster: np.ndarray


@lru_cache(maxsize=1024)
def divisions(heads: tuple[int, ...], most: int, splits: int | None) -> Divisions:
    """Every division with 1 to `most` splits, or with `splits`."""
    found = []
    for n in heads:
        for s in range(1, most + 1) if splits is None else (splits,):
            cluster = max(c for c in range(1, MAX_CLUSTER + 1) if s % c == 0)
            found += [Division(n, s, 1), Division(n, s, cluster)] if cluster > 1 else [Division(n, s, 1)]
    return Divisions(found, *np.array(found).T)


class Candidates:
    """The divisions of calls that differ only in the number of queries, and how long each takes.

    Args:
        divisions: the candidates.
        h_q: heads of the call.
        at_once: clusters of 1, 2, ... MAX_CLUSTER CTAs that the GPU runs at a time.
        cta: microseconds of a CTA, a cluster's merge included, of each division.
        more_when_full: what is added in proportion as CTAs fill the GPU.
        combine: microseconds of combine.cu's launch.
        per_partial: microseconds of combine.cu for each thousand partial results.
    """

    def __init__(
        self,
        divisions: Divisions,
        h_q: int,
        at_once: tuple[int, ...],
        cta: np.ndarray,
        more_when_full: np.ndarray | float,
        combine: float,
        per_partial: np.ndarray | float,
    ) -> None:
        self._divisions = divisions.all
        self._cta, self._more = cta, more_when_full
        partials = divisions.splits // divisions.cluster
        self._clusters = -(-h_q // divisions.heads) * partials  # of a query
        self._at_once = np.array(at_once)[divisions.cluster - 1]
        self._share = self._clusters * divisions.cluster / at_once[0]  # of the GPU, of a query
        self._combine = np.where(partials > 1, combine, 0.0)
        self._per_query = np.where(partials > 1, per_partial * h_q * partials / 1000, 0.0)
        self._asked = 0
        self._known: list[int] = []  # for 1, 2, ... KNOWN_QUERIES queries

    def cheapest(self, queries: int) -> Division:
        """The division that takes the least time for so many queries.

        Those of all batches are found together when a second one is asked for, which takes milliseconds. Calls whose
        lists have another length each time are spared that.
        """
        self._asked += 1
        if queries > KNOWN_QUERIES or self._asked == 1:
            return self._divisions[int(self._best(np.array([queries]))[0])]
        if not self._known:
            self._known = self._best(np.arange(1, KNOWN_QUERIES + 1)).tolist()
        return self._divisions[self._known[queries - 1]]

    def _best(self, queries: np.ndarray) -> np.ndarray:
        """The index of the cheapest division, for each number of queries."""
        queries = queries[:, None]
        waves = (queries * self._clusters + (self._at_once - 1)) // self._at_once
        time = (self._cta + self._more * np.minimum(1.0, queries * self._share)) * waves
        return np.argmin(time + self._combine + queries * self._per_query, axis=1)


@lru_cache(maxsize=1024)
def fp8_candidates(
    heads: tuple[int, ...], h_q: int, tiles: int, at_once: tuple[int, ...], splits: int | None
) -> Candidates:
    """Divisions for `fp8_sm90`, for queries of so many tiles; `splits` None: to be chosen."""
    found = divisions(heads, max(1, min(tiles, at_once[0])), splits)
    merges = found.cluster > 1
    pairs = (-(-tiles // found.splits) + 1) // 2
    alone, more = (_by_heads({n: times[i] for n, times in FP8_CTA.items()})[found.heads] for i in (0, 1))
    merge, merge_more = (_by_heads({n: times[i] for n, times in FP8_MERGE.items()})[found.heads] for i in (0, 1))
    cta = alone + _by_heads(FP8_PAIR)[found.heads] * pairs + merge * merges
    per_partial = _by_heads(FP8_PARTIAL)[found.heads]
    return Candidates(found, h_q, at_once, cta, more + merge_more * merges, FP8_COMBINE, per_partial)


@lru_cache(maxsize=1024)
def few_heads_candidates(heads: int, h_q: int, tiles: int, at_once: tuple[int, ...], splits: int | None) -> Candidates:
    """Divisions for `few_heads_sm90`, for queries of so many tiles; `splits` None: to be chosen."""
    found = divisions((heads,), max(1, min(tiles, at_once[0])), splits)
    each = -(-tiles // found.splits)
    rounds = -(-each // FEW_CONSUMERS[heads])
    cta = FEW_CTA + FEW_TILE * each + FEW_ROUND * rounds + FEW_MERGE[heads] * (found.cluster > 1)
    return Candidates(found, h_q, at_once, cta, FEW_FULL, FEW_COMBINE, FEW_PARTIAL)


# Of the portable kernel, in steps of its main loop (about 4 us on an H200): Q, first rows and results of a CTA; the
# launch of combine.cu; what each split adds to that launch, once and for each CTA of an unsplit launch. Fitted to 2048
# rows at 16, 64 and 128 heads, batch 1 to 64, 1 to 64 splits: the choice is within 10 % of the best of those.
CTA_OVERHEAD = 2.0
COMBINE_OVERHEAD = 0.5
SPLIT_OVERHEAD, SPLIT_OVERHEAD_PER_CTA = 0.08, 0.01


@lru_cache(maxsize=4096)
def portable_splits(ctas: int, steps: int, slots: int) -> int:
    """Splits with which the portable kernel takes the least time.

    Args:
        ctas: of an unsplit launch (queries times head tiles).
        steps: main-loop steps of the longest query.
        slots: CTAs that the GPU runs at a time.

    Returns:
        1 when the CTAs fill the GPU, at most one split a step.
    """
    splits = np.arange(1, max(1, min(steps, 2 * slots, MAX_SPLITS)) + 1)
    waves = -(-ctas * splits // slots)
    time = waves * (-(-steps // splits) + CTA_OVERHEAD)
    time[1:] += COMBINE_OVERHEAD + splits[1:] * (SPLIT_OVERHEAD + SPLIT_OVERHEAD_PER_CTA * ctas)
    return int(splits[np.argmin(time)])
