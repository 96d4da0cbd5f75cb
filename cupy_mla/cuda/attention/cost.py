"""How long a launch of an attention kernel takes on an H200, for `choose.py`: microseconds fitted to measurements.

A query's rows may be split, so that a small batch fills the GPU. The splits of a query are CTAs of a cluster, which
merges their results, or they leave partial results, which `combine.cu` merges, or both; or all rows of a launch are
divided evenly, one share a CTA. A `Division` says how a launch is divided; the cheapest one is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..driver import MAX_CLUSTER

EVENLY = 0  # as splits
TEAM = 0  # as cluster
MAX_SPLITS = 1024  # of a query's rows; each takes memory for a partial result
TOGETHER = 512  # numbers of queries that are decided together: a server meets another one at every step


def decided_with(queries: int) -> range:
    """The numbers of queries that are decided together with this one."""
    first = (max(1, queries) - 1) // TOGETHER * TOGETHER + 1
    return range(first, first + TOGETHER)


class Division(NamedTuple):
    """How a launch is divided.

    Attributes:
        heads: of a CTA.
        splits: of a query's rows; `EVENLY`: wherever an equal share of all rows ends.
        cluster: splits that the CTAs of a cluster merge; splits / cluster partial results are left for `combine.cu`.
            `TEAM`: the splits of a query are CTAs that merge their results and are no cluster, with `EVENLY` as many as
            its lists are long.
    """

    heads: int
    splits: int
    cluster: int

    @property
    def partials(self) -> int:
        """Partial results of a query and head that are left for `combine.cu`; 1: none."""
        return 1 if self.cluster == TEAM else self.splits // self.cluster


# Of `fp8_sm90`, by the heads of a CTA, fitted to 640 to 2048 rows and batches of 1 to 264.
FP8_ITEM = {32: 4.6, 64: 7.8}  # a work item: Q, first rows and results
FP8_PAIR = {32: 3.07, 64: 3.87}  # a pair of tiles
FP8_MERGE = {32: 3.6, 64: 2.8}  # a cluster's merge
FP8_RING = {32: 4, 64: 3}  # stages of the ring, a tile each
FP8_LONG = {32: 1.0, 64: 0.9}  # added to splits of more tiles than the ring has stages
FP8_WHOLE = {32: 3.8, 64: 2.6}  # added once where items are not split
# What is added as CTAs fill the GPU: to an item, and to each of its pairs; the part of the latter that is left where
# several items read the same rows; and the part of both that a launch's first items pay.
FP8_FULL, FP8_FULL_PAIR, FP8_SHARED, FP8_FIRST = {32: 2.3, 64: 2.4}, {32: 0.61, 64: 0.53}, {32: 0.38, 64: 0.83}, 0.7
FP8_EVEN = {32: (15.1, 3.27, 10.6), 64: (20.9, 4.02, 15.1)}  # rows divided evenly: once, a pair and an item of a CTA
FP8_PARTIAL = {32: 3.5, 64: 0.9}  # another CTA's partial result, there
# Where queries have lengths of their own: the part that is left of EVEN's pairs, of its items, and of unsplit items in
# several rounds; and what is added to EVEN once.
FP8_UNEVEN = (0.55, 0.8, 0.95, 3.5)
FP8_SEGMENT = {32: 4.0, 64: 6.5}  # a split of a CTA that takes an item's splits in turn, beside its pairs
# Added to a cluster's merge where CTAs are a team: of equal splits; of as many CTAs as lengths ask for.
FP8_TEAM = (0.9, 5.7)
# Where lengths ask for them: the CTAs that an item has at least, on average, of lists of up to so many tiles and of
# longer ones. With fewer than two, items whose lists all turn out to be full have one.
FP8_TEAM_LEAST, FP8_TEAM_LONG, FP8_TEAM_LEAST_LONG = 1.75, 20, 2.0
FP8_LEAST_SPLIT = 2  # pairs of tiles

# Of shares (kernels_cu/attention/division/shares.cuh): what a pair of tiles costs, and a work item beside them; and
# that of each kernel where lists are not equally long, or end with -1.
PAIR_COST, ITEM_COST = 8, 11
UNEVEN_ITEM_COST = {"fp8_sm90": 8, "bf16_shares_sm90": 8, "few_heads_sm90": 11, "portable": 11}
CUT_COST = 24  # what a share of such lists costs more because items are cut
# Of a share of `fp8_sm90` with 64 heads, in the time of a pair of tiles: Q and first rows of each item, results, and
# the partial results that it leaves and merges. From clocks within the kernel.
SHARE_ITEM, SHARE_RESULTS, SHARE_LEFT, SHARE_MERGED = 0.96, 0.63, 0.56, 0.81
# Item costs below this are tried. Where a share is less than an item, none above ITEM_COST: CTAs wait for each other's
# partial results, which the times above leave out. SHARE_GAIN: what another one than ITEM_COST must gain.
SHARE_COSTS, SHARE_GAIN = 21, 0.01

# Of `few_heads_sm90`; dictionaries are by the heads of a CTA.
FEW_CTA, FEW_FULL = 2.9, 4.8  # a CTA, and what it takes longer as CTAs fill the GPU
FEW_TILE, FEW_ROUND = 1.2, 0.75  # a tile; a round, in which each consumer warpgroup takes a tile
FEW_MERGE = {8: 3.2, 16: 3.2, 32: 5.0}  # a cluster's merge
FEW_COMBINE, FEW_PARTIAL = 4.2, 1.0  # `combine.cu`, once and for 1000 partial results of a head
FEW_CONSUMERS = {8: 3, 16: 3, 32: 2}  # consumer warpgroups of a CTA


def _by_heads(values: Mapping[int, float]) -> np.ndarray:
    """Numbers that depend on the heads of a CTA, to be indexed by them."""
    found = np.zeros(max(values) + 1)
    found[list(values)] = list(values.values())
    return found


def _rounds(clusters: Any, at_once: Any) -> Any:
    """Rounds in which a GPU runs so many clusters; no end of them where it runs none of that size, as a part of a GPU
    (MIG) or one whose GPCs have few SMs. Numbers or arrays."""
    return np.where(np.equal(at_once, 0), np.inf, -(-clusters // np.maximum(at_once, 1)))


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
        time: microseconds for numbers of queries, [numbers, 1], of each division: [numbers, divisions].
    """

    def __init__(self, divisions: list[Division], time: Callable[[np.ndarray], np.ndarray]) -> None:
        self._divisions, self._time = divisions, time
        self._asked = 0
        self._known: dict[range, list[int]] = {}  # for neighbouring numbers of queries

    def cheapest(self, queries: int) -> Division:
        """The division that takes the least time for so many queries.

        Those of neighbouring numbers are found together when a second number is asked for, which takes milliseconds.
        Calls whose lists have another length each time are spared that.
        """
        self._asked += 1
        if self._asked == 1:
            return self._divisions[int(self._best(np.array([queries]))[0])]
        neighbours = decided_with(queries)
        known = self._known.get(neighbours)
        if known is None:
            known = self._known[neighbours] = self._best(np.array(neighbours)).tolist()
        return self._divisions[known[queries - neighbours[0]]]

    def _best(self, queries: np.ndarray) -> np.ndarray:
        """The index of the cheapest division, for each number of queries."""
        return np.argmin(self._time(queries[:, None]), axis=1)


def _fp8_rounds(rounds: Any, item: Any, full: Any, more: Any) -> Any:
    """The time of so many rounds of work items that take `item` each, and up to `more` as CTAs fill the GPU: numbers or
    arrays."""
    return rounds * item + (FP8_FIRST + (1.0 - FP8_FIRST) * rounds) * full * more


@lru_cache(maxsize=1024)
def fp8_candidates(
    heads: tuple[int, ...], h_q: int, tiles: int, at_once: tuple[int, ...], splits: int | None, uneven: bool = False
) -> Candidates:
    """Divisions for `fp8_sm90`, for queries of so many tiles: unsplit, clusters, teams, and equal shares.

    Args:
        heads: of a CTA.
        h_q: heads of the call.
        at_once: clusters of 1, 2, ... MAX_CLUSTER CTAs that the GPU runs at a time.
        splits: that are asked for; more than a cluster holds are CTAs that leave partial results to one of them. None:
            to be chosen.
        uneven: queries have lengths of their own.
    """
    if splits is None:
        most = min(tiles, MAX_CLUSTER) if tiles > 2 else 1  # a pair of tiles takes less time than a merge
        found = [Division(n, s, s) for n in heads for s in range(1, most + 1)] + [Division(n, EVENLY, 1) for n in heads]
        if uneven:  # CTAs with as many of a query's heads as they can have
            found += [Division(n, EVENLY, TEAM) for n in heads if n >= min(h_q, heads[-1])]
        else:
            found += [Division(n, s, TEAM) for n in heads for s in range(2, most + 1)]
    else:
        found = [Division(n, splits, splits if splits <= MAX_CLUSTER else 1) for n in heads]
    of, asked, cluster = np.array(found).T
    teams, clusters = cluster == TEAM, np.maximum(cluster, 1)
    sms = at_once[0]
    parts = np.maximum(asked, 1)
    of_split = -(-tiles // parts)
    pairs = (of_split + of_split % 2 * (cluster == 1)) / 2  # whole items and shares have no tile alone
    if uneven:  # few lists are so long that a cluster's split has the tiles of the longest, rounded up
        pairs = np.where(clusters > 1, np.maximum(1.0, tiles / parts) / 2, pairs)
    items = -(-h_q // of)  # of a query
    item, pair, merge, longer, ring, unsplit, full_item, full_pair, shared, partial = (
        _by_heads(times)[of]
        for times in (
            FP8_ITEM, FP8_PAIR, FP8_MERGE, FP8_LONG, FP8_RING, FP8_WHOLE, FP8_FULL, FP8_FULL_PAIR, FP8_SHARED,
            FP8_PARTIAL,
        )
    )  # fmt: skip
    full_pair = full_pair * np.where(items > 1, shared, 1.0)
    once, even_pair, even_item = (_by_heads({n: FP8_EVEN[n][i] for n in FP8_EVEN})[of] for i in range(3))
    of_pair, of_item, of_whole, more = FP8_UNEVEN if uneven else (1.0, 1.0, 1.0, 0.0)
    each = of_pair * even_pair * (-(-tiles // 2)) + of_item * even_item
    split = item + pair * pairs + (merge + longer * (of_split > ring)) * (clusters > 1)
    runs = np.array(at_once)[clusters - 1]

    def time(queries: np.ndarray) -> np.ndarray:
        rounds = _rounds(queries * items, runs)
        if splits is None:  # clusters that wait for others lose more than this model knows, most with short lists
            rounds = np.where((clusters > 1) & (rounds > 1), np.inf, rounds)
        full = np.minimum(1.0, queries * items * clusters / sms)
        whole = np.where(rounds > 1, of_whole, 1.0) * _fp8_rounds(rounds, split, full, full_item + full_pair * pairs)
        whole = whole + unsplit * (asked == 1)
        share = queries * items / sms
        even = once + more + each * share + partial * np.maximum(0.0, 1.0 / np.maximum(share, 1.0 / sms) - 1.0)
        ctas = sms / (queries * items)
        if uneven:  # as often short as long: CTAs that serve one item have half a split to spare
            quota = np.minimum(tiles, tiles / np.clip(2 * ctas - 1, 1, MAX_CLUSTER) + 0.5)
            full, least = 1.0, FP8_TEAM_LEAST if tiles <= FP8_TEAM_LONG else FP8_TEAM_LEAST_LONG
        else:
            quota, full, least = of_split, np.minimum(1.0, asked / ctas), asked
        team = item + pair * quota / 2 + merge + longer * (quota > ring) + full * (full_item + full_pair * quota / 2)
        team = np.where(ctas >= least, team + FP8_TEAM[uneven], np.inf)
        return np.where(teams, team, np.where(asked == EVENLY, even, whole))

    return Candidates(found, time)


def fp8_in_turn(heads: int, items: int, tiles: int, splits: int, at_once: tuple[int, ...]) -> bool:
    """Whether `fp8_sm90` takes less time with CTAs that take the splits of an item in turn than with clusters.

    Args:
        items: work items of the call, of so many tiles each.
        at_once: clusters of 1, 2, ... MAX_CLUSTER CTAs that the GPU runs at a time.
    """
    pairs = -(-tiles // splits) / 2

    def time(ctas: int, split: float, pairs: float) -> float:
        """An item by so many CTAs: what its splits add, and the pairs of each CTA."""
        rounds, full = float(_rounds(items, at_once[ctas - 1])), min(1.0, items * ctas / at_once[0])
        item = FP8_ITEM[heads] + FP8_PAIR[heads] * pairs + split
        return _fp8_rounds(rounds, item, full, FP8_FULL[heads] + FP8_FULL_PAIR[heads] * pairs)

    return time(1, splits * FP8_SEGMENT[heads], splits * pairs) < time(splits, FP8_MERGE[heads], pairs)


@lru_cache(maxsize=1024)
def fp8_item_cost(items: int, pairs: int, ctas: int) -> int:
    """What an item is to cost beside its pairs, so that the slowest share of `fp8_sm90` takes the least time.

    Shares end at whole pairs. Which ones get a pair more changes with the cost of an item.

    Args:
        items: of 64 heads, each of so many pairs of tiles.
        ctas: shares.
    """
    tried = range(SHARE_COSTS if items >= ctas else ITEM_COST + 1)
    costs = np.array(sorted(tried, key=lambda cost: abs(cost - ITEM_COST)))[:, None]  # ITEM_COST first
    of_item = costs + PAIR_COST * pairs
    item, at = np.divmod(items * of_item * np.arange(ctas + 1) // ctas, of_item)
    pair = (np.maximum(at - costs, 0) + PAIR_COST // 2) // PAIR_COST  # as shares.cuh: before which a share begins
    late, early = pairs - pair < FP8_LEAST_SPLIT, pair < FP8_LEAST_SPLIT
    item = item + (late & ~early)
    pair = np.where(late | early, 0, pair)
    time = np.diff(item * pairs + pair) + (SHARE_ITEM + SHARE_RESULTS) * np.diff(item)
    time = time + (SHARE_ITEM + SHARE_LEFT) * (pair[:, 1:] > 0) + SHARE_MERGED * (pair[:, :-1] > 0)
    slowest = time.max(axis=1)
    best = int(np.argmin(slowest))
    return int(costs[best, 0]) if slowest[best] < (1.0 - SHARE_GAIN) * slowest[0] else ITEM_COST


@lru_cache(maxsize=1024)
def few_heads_candidates(
    heads: tuple[int, ...], h_q: int, tiles: int, at_once: tuple[int, ...], splits: int | None
) -> Candidates:
    """Divisions for `few_heads_sm90`, for queries of so many tiles.

    Args:
        heads: of a CTA.
        h_q: heads of the call.
        at_once: clusters of 1, 2, ... MAX_CLUSTER CTAs that the GPU runs at a time.
        splits: None: to be chosen.
    """
    found = divisions(heads, max(1, min(tiles, at_once[0])), splits)
    consumers, merge = (_by_heads(values)[found.heads] for values in (FEW_CONSUMERS, FEW_MERGE))
    each = -(-tiles // found.splits)
    rounds = -(-each // consumers)
    cta = FEW_CTA + FEW_TILE * each + FEW_ROUND * rounds + merge * (found.cluster > 1)
    partials = found.splits // found.cluster
    clusters = -(-h_q // found.heads) * partials  # of a query
    runs = np.array(at_once)[found.cluster - 1]
    combine = np.where(partials > 1, FEW_COMBINE, 0.0)
    per_query = np.where(partials > 1, FEW_PARTIAL * h_q * partials / 1000, 0.0)

    def time(queries: np.ndarray) -> np.ndarray:
        waves = _rounds(queries * clusters, runs)
        full = np.minimum(1.0, queries * clusters * found.cluster / at_once[0])
        return (cta + FEW_FULL * full) * waves + combine + queries * per_query

    return Candidates(found.all, time)


# Of `bf16_sm90` and `bf16_shares_sm90`, fitted to 512 to 2048 rows, batch 37 to 270 of 17 to 128 heads. ITEM, PAIR: of
# a work item, and each of its pairs of tiles. LOAD: what is added to a pair, in decode, as CTAs fill the GPU, but not
# where several CTAs work on a query and read its rows from L2.
# EVEN: of rows that are divided evenly, once; SHARED: where CTAs read the same rows.
BF16_ITEM, BF16_PAIR, BF16_LOAD = 7.0, 3.5, 1.25
BF16_EVEN, BF16_EVEN_SHARED = 15.0, 16.0
# Where queries have random lengths, fitted to decode of 64 heads with lengths up to 2048; prefill was not measured.
# Divided evenly: once, and the part of a full work item's time that each takes. Whole items: the part that the longest
# one takes, and that a wave adds.
BF16_UNEVEN_EVEN, BF16_UNEVEN_WHOLE = (24.0, 0.52), (0.76, 0.35)


def bf16_evenly(items: int, head_tiles: int, pairs: int, sms: int, prefill: bool, uneven: bool = False) -> bool:
    """Whether flat bf16 rows take less time divided evenly than as whole work items, one CTA each at a time.

    Args:
        items: work items of the call.
        head_tiles: work items of a query.
        pairs: of tiles, of an item.
        sms: CTAs that run at a time.
        prefill: queries lie next to one another, and so do most of their rows.
        uneven: queries have lengths of their own. Those may be random, but in engines most are alike: so half of the
            calls are taken to be of each kind.
    """
    share = items / sms
    item = BF16_ITEM + BF16_PAIR * pairs
    gain = 0.0
    if uneven:
        (once, of_item), (of_longest, of_wave) = BF16_UNEVEN_EVEN, BF16_UNEVEN_WHOLE
        gain = (of_longest + of_wave * share) * item - once - of_item * share * (item + BF16_LOAD * pairs)
    once, load = (BF16_EVEN_SHARED, 0.0) if prefill or head_tiles > 1 else (BF16_EVEN, BF16_LOAD * pairs)
    rounds = -(-items // sms)
    whole = rounds * item + load * (rounds - 1 + (share - rounds + 1) ** 2)
    return once + share * (item + load) < whole + gain


# Of the portable kernel, in steps of 32 rows (2.2 us on an H200 with 64 heads, 1.4 us with 16). Fitted to V32 decode of
# 2048 rows with 16 heads (batch 5 to 160), 64 (1 to 160) and 128 (100).
CTA_OVERHEAD = 4.9  # a CTA: Q, first rows and results
COMBINE_OVERHEAD = 0.5  # the launch of `combine.cu`
SPLIT_OVERHEAD, SPLIT_OVERHEAD_PER_CTA = 0.01, 0.015  # each split adds to that launch, once and a CTA of an unsplit one
EVEN_OVERHEAD, EVEN_PARTIAL = 9.9, 1.3  # rows divided evenly: once, and for each partial result of an item


@lru_cache(maxsize=4096)
def portable_splits(ctas: int, steps: int, slots: int) -> int:
    """Splits with which the portable kernel takes the least time; `EVENLY`: equal shares of all rows.

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
    share = ctas / slots
    even = share * (steps + CTA_OVERHEAD) + EVEN_OVERHEAD + EVEN_PARTIAL * max(0.0, 1.0 / share - 1.0)
    return EVENLY if even < time.min() else int(splits[np.argmin(time)])
