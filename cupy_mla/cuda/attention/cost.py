"""How long a launch of an attention kernel takes on an H200, for `choose.py`: microseconds fitted to measurements.

A query's rows may be split, so that a small batch fills the GPU. Splits of a query are CTAs of one cluster, which merge
what they found, or they leave partial results, which `combine.cu` merges, or both. A `Division` says how a launch is cut
up; the cheapest one is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..driver import MAX_CLUSTER


class Division(NamedTuple):
    """How a launch is cut up.

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


class Times(NamedTuple):
    """Microseconds of a kernel, in arrays: one entry a division."""

    cta: np.ndarray  # of a CTA, a cluster's merge included
    more_when_full: np.ndarray  # added in proportion as CTAs fill the GPU
    combine: np.ndarray  # of combine.cu's launch
    combine_per_partial: np.ndarray  # of it, for each thousand partial results of a head


# Fitted to 2048 rows, batch 1 to 64. By the heads of a CTA: a CTA besides its rows (Q, first rows, results) and what is
# added as CTAs fill the GPU; a pair of tiles; a cluster's merge, likewise; combine.cu, and 1000 partial results in it.
FP8_CTA, FP8_PAIR = {32: (4.0, 6.0), 64: (7.0, 0.0)}, {32: 3.0, 64: 4.1}
FP8_MERGE = {32: (3.4, -3.0), 64: (3.5, 5.0)}
FP8_COMBINE, FP8_PARTIAL = 4.0, {32: 0.3, 64: 1.0}

# The same for the kernel for few heads: a CTA, what is added when the GPU is full, a tile, a round of a tile for each of
# a CTA's consumer warpgroups, a cluster's merge by the heads of a CTA, combine.cu.
FEW_CTA, FEW_FULL, FEW_TILE, FEW_ROUND = 2.9, 4.8, 1.2, 0.75
FEW_MERGE = {8: 3.3, 16: 3.3, 32: 5.0}
FEW_COMBINE, FEW_PARTIAL = 4.2, 1.0
FEW_CONSUMERS = {8: 3, 16: 3, 32: 2}  # warpgroups that multiply


class Divisions(NamedTuple):
    """Many divisions, as arrays."""

    heads: np.ndarray
    splits: np.ndarray
    cluster: np.ndarray


@lru_cache(maxsize=256)
def divisions(heads: tuple[int, ...], most: int, splits: int | None) -> Divisions:
    """Every division with 1 to `most` splits, or with `splits`."""
    rows = []
    for n in heads:
        for s in range(1, most + 1) if splits is None else (splits,):
            cluster = max(c for c in range(1, MAX_CLUSTER + 1) if s % c == 0)
            rows += [(n, s, 1), (n, s, cluster)] if cluster > 1 else [(n, s, 1)]
    return Divisions(*np.array(rows, np.int64).T)


def _of(table: dict[int, float], heads: np.ndarray) -> np.ndarray:
    return np.array([table[n] for n in heads.tolist()])


@lru_cache(maxsize=1024)
def fp8_times(heads: tuple[int, ...], most: int, splits: int | None, tiles: int) -> Times:
    """Of `fp8_sm90`, for queries of so many tiles."""
    d = divisions(heads, most, splits)
    merges = d.cluster > 1
    pairs = -(-(-(-tiles // d.splits)) // 2)
    alone, more = (_of({n: v[i] for n, v in FP8_CTA.items()}, d.heads) for i in (0, 1))
    merge, merge_more = (_of({n: v[i] for n, v in FP8_MERGE.items()}, d.heads) * merges for i in (0, 1))
    cta = alone + _of(FP8_PAIR, d.heads) * pairs + merge
    return Times(cta, more + merge_more, np.full(cta.shape, FP8_COMBINE), _of(FP8_PARTIAL, d.heads))


@lru_cache(maxsize=1024)
def few_heads_times(heads: tuple[int, ...], most: int, splits: int | None, tiles: int) -> Times:
    """Of `few_heads_sm90`, for queries of so many tiles."""
    d = divisions(heads, most, splits)
    each = -(-tiles // d.splits)
    rounds = -(-each // _of(FEW_CONSUMERS, d.heads))
    cta = FEW_CTA + FEW_TILE * each + FEW_ROUND * rounds + _of(FEW_MERGE, d.heads) * (d.cluster > 1)
    same = np.ones(cta.shape)
    return Times(cta, FEW_FULL * same, FEW_COMBINE * same, FEW_PARTIAL * same)


def cheapest(times: Times, d: Divisions, h_q: int, queries: int, at_once: Sequence[int]) -> Division:
    """The division with the least time.

    Args:
        h_q: heads of the call.
        queries: query tokens of the call.
        at_once: clusters of 1, 2, ... MAX_CLUSTER CTAs that the GPU runs at a time.
    """
    partials = d.splits // d.cluster
    clusters = queries * -(-h_q // d.heads) * partials
    waves = -(-clusters // np.asarray(at_once)[d.cluster - 1])
    full = np.minimum(1.0, clusters * d.cluster / at_once[0])
    time = (times.cta + times.more_when_full * full) * waves
    time += (times.combine + times.combine_per_partial * (queries * h_q * partials / 1000)) * (partials > 1)
    best = int(np.argmin(time))
    return Division(int(d.heads[best]), int(d.splits[best]), int(d.cluster[best]))


def fp8_division(
    heads: tuple[int, ...], h_q: int, queries: int, tiles: int, at_once: tuple[int, ...], splits: int | None
) -> Division:
    """The cheapest division for `fp8_sm90`; `splits` None: to be chosen."""
    most = max(1, min(tiles, at_once[0]))
    return cheapest(fp8_times(heads, most, splits, tiles), divisions(heads, most, splits), h_q, queries, at_once)


def few_heads_division(
    heads: int, h_q: int, queries: int, tiles: int, at_once: tuple[int, ...], splits: int | None
) -> Division:
    """The cheapest division for `few_heads_sm90`; `splits` None: to be chosen."""
    most = max(1, min(tiles, at_once[0]))
    times = few_heads_times((heads,), most, splits, tiles)
    return cheapest(times, divisions((heads,), most, splits), h_q, queries, at_once)


# In steps of the portable kernel's main loop (about 4 us on an H200): what a CTA costs besides its steps (Q, first rows,
# results), what the launch that merges splits costs, and what each split adds to it, once and a CTA. Fitted to 2048 rows
# at 16, 64 and 128 heads, batch 1 to 64, 1 to 64 splits: what is chosen is within 10 % of the best of those.
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
    splits = np.arange(1, max(1, min(steps, 2 * slots)) + 1)
    waves = -(-ctas * splits // slots)
    time = waves * (-(-steps // splits) + CTA_OVERHEAD)
    time[1:] += COMBINE_OVERHEAD + splits[1:] * (SPLIT_OVERHEAD + SPLIT_OVERHEAD_PER_CTA * ctas)
    return int(splits[np.argmin(time)])
