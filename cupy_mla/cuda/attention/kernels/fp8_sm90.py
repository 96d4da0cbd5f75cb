"""`kernels_cu/attention/fp8_sm90.cu`: FP8 rows on Hopper, 16, 32 or 64 heads of a query at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ....layouts import (
    D_V,
    EXTRA_OF,
    PLAIN_FP8_512,
    PLAIN_FP8_576,
    V4_FP8,
    V4_NVFP4,
    V32_FP8,
    V32_NOPE_FP8,
    V32_NVFP4,
    V41_FP4,
    V41_FP4_SPLIT,
    V41_FP8,
    V41_FP8_SPLIT,
    Layout,
)
from ... import structs
from ...driver import MAX_CLUSTER
from ...kernel import Kernel
from ...program import Launch, Program
from ..call import Call
from ..divide import (
    HALF_PARTIAL_BYTES,
    ITEM_COST,
    PAIR_COST,
    Clusters,
    Division,
    Segments,
    Shares,
    Teams,
    Whole,
    even_shares,
    nearest_pair,
    split_numbers,
)
from ..problem import TILE_ROWS, Problem
from ..times import Work
from .work import cluster_splits, in_rounds, rounds_of, shares, split, whole

# The kernel reads all LAYOUTS, `dense_fp8_sm90` those of FP8.
LAYOUTS_OF_FP8 = (V32_FP8, V4_FP8, PLAIN_FP8_576, PLAIN_FP8_512, V32_NOPE_FP8, V41_FP8, V41_FP8_SPLIT)
LAYOUTS = (*LAYOUTS_OF_FP8, V32_NVFP4, V4_NVFP4)
HEADS = (16, 32, 64)  # heads a CTA is built for
RING = {16: 4, 32: 4, 64: 3}  # stages of a tile each, by heads of a CTA; kernels_cu/attention/fp8_sm90.cu
UNEVEN_ITEM_COST = 8  # what an item of unequal lists costs beside its pairs, in eighths of a pair of tiles
LEAST_SPLIT = 2  # pairs of tiles of a split in shares
INVARIANT_ROWS = 704  # of a split of a batch-invariant call; large batches take them as `Segments`

# Numbers of divisions in kernels_cu/attention/division/division.cuh.
WHOLE, CLUSTERS, SHARES, SEGMENTS, TEAMS = DIVISIONS = 0, 1, 2, 3, 4
PLAIN_DIVISIONS = WHOLE, CLUSTERS, SHARES  # of rows with one scale for the whole call
# The names of the layouts whose times each layout has.
TIMED_AS = {
    **dict.fromkeys((V32_FP8, PLAIN_FP8_576, V32_NOPE_FP8, V32_NVFP4), V32_FP8.name),
    **dict.fromkeys((V4_FP8, PLAIN_FP8_512, V41_FP8, V41_FP8_SPLIT, V4_NVFP4), V4_FP8.name),
}
MOST_SPLITS = 256  # of a work item in shares: a CTA merges no more partial results
# Bytes that a thread may spill, by layout and division. They are addresses, one or two of a tile.
SPILL_BYTES = {SEGMENTS: 20}
SPILL_BYTES_OF = {
    V32_FP8: {**SPILL_BYTES, TEAMS: 4}, V32_NOPE_FP8: {**SPILL_BYTES, TEAMS: 8, CLUSTERS: 4},
    V4_NVFP4: {**SPILL_BYTES, TEAMS: 12, CLUSTERS: 12},
    V41_FP4: {**SPILL_BYTES, TEAMS: 16, CLUSTERS: 16}, V41_FP4_SPLIT: {**SPILL_BYTES, TEAMS: 16, CLUSTERS: 16},
}  # fmt: skip


def defines(
    layout: Layout, lines: int, division: int, dense: bool = False, extra: Layout | None = None
) -> dict[str, int | str]:
    """The constants that the pipeline is compiled with.

    Args:
        lines: of a work item; over index lists its heads.
        division: its number.
        dense: rows come from a block table.
        extra: the layout of extra caches where it differs from `layout`.
    """
    return {
        **layout.defines_beside(extra), "D_V": D_V, "HEADS": lines, "TILE_ROWS": TILE_ROWS, "DIVISION": division,
        "MAX_CLUSTER": MAX_CLUSTER, "MOST_SPLITS": MOST_SPLITS, "UNEVEN_ITEM_COST": UNEVEN_ITEM_COST,
        "DENSE": int(dense),
    }  # fmt: skip


@cache
def kernel(layout: Layout, heads: int, division: int, extra: Layout | None) -> Kernel:
    """The kernel for one cache layout, heads of a CTA, and one of `DIVISIONS`.

    Args:
        extra: the layout of extra caches where it differs from `layout`; else None.
    """
    spills = SPILL_BYTES_OF.get(extra or layout, SPILL_BYTES)
    made = defines(layout, heads, division, extra=extra)
    return Kernel(
        "attention/fp8_sm90.cu", structs.ATTENTION, made, archs=("90a",),
        spill_bytes=spills.get(division, 0), max_cluster=MAX_CLUSTER if division == CLUSTERS else 1, overlaps=True,
    )  # fmt: skip


@cache
def cluster_kernel() -> Kernel:
    """The variant that `Gpu.clusters_at_once` is asked about. A CTA of every variant takes a whole SM."""
    return kernel(V32_FP8, max(HEADS), CLUSTERS, None)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in LAYOUTS:
        for heads in HEADS:
            for division in PLAIN_DIVISIONS if layout.scale_of_call else DIVISIONS:
                for extra in (None, *EXTRA_OF.get(layout, ())):
                    yield kernel(layout, heads, division, extra)


def serves(problem: Problem) -> bool:
    """Decode over FP8 and FP4 rows."""
    return problem.on_hopper and problem.layout in LAYOUTS and not problem.prefill


def cta_heads(heads: int) -> tuple[int, ...]:
    """The numbers of heads of a CTA that may be the fastest for a query with so many heads."""
    return HEADS[:1] if heads <= 16 else HEADS[1:2] if heads <= 32 else HEADS[1:]


def candidates(problem: Problem) -> Iterator[Division]:
    """Whole items, shares, clusters and teams. Prescribed splits: clusters and segments, or shares if they are many."""
    asked, forced, plain = problem.splits(INVARIANT_ROWS), problem.division, problem.layout.scale_of_call
    at_once = problem.gpu.clusters_at_once(cluster_kernel())
    for heads in HEADS if forced else cta_heads(problem.heads):
        items = problem.items(heads)
        if asked > MAX_CLUSTER:
            yield Shares(heads, splits=min(asked, MOST_SPLITS))
        elif asked > 1 or forced:
            yield Clusters(heads, asked or 2, asked or 2)
            if not plain:
                yield Segments(heads, asked or 2)
        if asked <= 1:
            yield Whole(heads)
        if asked and not forced:
            continue
        yield Shares(heads)
        if not plain and (forced or (problem.uneven and items <= problem.gpu.sms)):
            yield Teams(heads, asked)
        if problem.tiles <= 2 or asked:
            continue  # a merge takes longer than so few tiles
        for n in cluster_splits(problem, items, problem.tiles, at_once):
            yield Clusters(heads, n, n)
        if not problem.uneven and not plain:
            most = min(problem.gpu.sms // max(1, items), MAX_CLUSTER)
            for n in [*split_numbers(problem.tiles, most)][-2:]:
                yield Teams(heads, n)


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    if problem.layout.scale_of_call and isinstance(division, Segments | Teams):
        return False
    if isinstance(division, Whole):
        return division == Whole(division.heads) and division.heads in HEADS
    if isinstance(division, Clusters):
        return division.heads in HEADS and 1 < division.splits == division.cluster <= MAX_CLUSTER
    if isinstance(division, Shares):
        return division.heads in HEADS and 0 <= division.splits <= MOST_SPLITS
    by_length = isinstance(division, Teams) and problem.uneven and division.splits == 0
    return division.heads in HEADS and (1 < division.splits <= MAX_CLUSTER or by_length)


def work(problem: Problem, division: Any) -> Work:
    """The work of a division, see `work.py`."""
    heads, sms, tiles = division.heads, problem.gpu.sms, problem.tiles
    items = problem.items(heads)
    shared = problem.heads > heads > HEADS[0]  # CTAs of the fewest heads have no such times: they take all of a query
    kind = "whole"
    if isinstance(division, Whole):
        names, amounts = whole(problem, items, problem.pairs, shared)
    elif isinstance(division, Shares) and not division.splits:
        kind = "shares"
        names, amounts = shares(problem, items, shared)
    elif isinstance(division, Segments):  # each split is an item to the CTA
        pairs = -(-tiles // division.splits) / 2 * division.splits
        names, (launch, rounds, *more) = whole(problem, items, pairs, shared)
        amounts = launch, rounds * division.splits, *more
    else:
        kind = "teams" if isinstance(division, Teams) else "clusters"  # equal splits in `Shares` take as long as these
        splits = division.splits
        if not splits:  # by length: half of the lists are short, so a full one has nearly twice the CTAs of the mean
            splits = min(max(2 * sms / items - 1, 1.0), MAX_CLUSTER)
            split_tiles = min(tiles, tiles / splits + 0.5)
        elif problem.uneven:  # few lists are full, so rounding up the tiles of a split hardly matters
            split_tiles = max(1.0, tiles / splits)
        else:
            split_tiles = -(-tiles // splits)
        names, amounts = split(problem, int(items * splits), splits, split_tiles / 2, shared)
        names, amounts = (*names, "splits longer than the ring"), (*amounts, split_tiles > RING[heads])
        clustered = isinstance(division, Clusters)
        rounds = rounds_of(items, problem.gpu.clusters_at_once(cluster_kernel())[splits - 1] if clustered else sms)
        amounts = in_rounds(amounts, rounds)
    return (TIMED_AS[problem.layout], kind, heads, problem.lists), names, amounts


def same_bits(division: Division) -> Iterator[Division]:
    """The divisions that give the same bits as one, itself among them."""
    if isinstance(division, Clusters | Segments):
        yield Clusters(division.heads, division.splits, division.splits)
        yield Segments(division.heads, division.splits)
    else:
        yield division


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch: a cluster for each work item, or CTAs among which the work is divided."""
    heads, cta_bytes = division.heads, division.heads * HALF_PARTIAL_BYTES
    fields: dict[str, Any]
    if isinstance(division, Clusters):
        params = call.packed(num_splits=division.num_splits, **division.memory(problem, cta_bytes))
        grid = (problem.items(heads) * division.cluster, 1, 1)
        variant_of_clusters = kernel(problem.layout, heads, CLUSTERS, problem.extra_layout)
        return [Launch(variant_of_clusters, grid, params, division.cluster)]
    if isinstance(division, Whole):
        variant, ctas, fields = WHOLE, division.grid(problem), call.end_fields()
    elif isinstance(division, Shares):
        even = heads == max(HEADS) and not problem.uneven and not division.splits
        most = max(1, min(problem.gpu.sms, problem.items(heads) * problem.pairs // LEAST_SPLIT))
        cost = item_cost(problem.items(heads), problem.pairs, most) if even and division.item_cost < 0 else ITEM_COST
        division = division.filled(problem, problem.gpu.sms, LEAST_SPLIT, cost)
        variant, ctas, fields = SHARES, division.ctas, division.fields(problem, cta_bytes)
        fields |= {} if division.splits else call.plan_fields(problem, heads, ctas)
    else:
        variant = TEAMS if isinstance(division, Teams) else SEGMENTS
        ctas, fields = division.grid(problem), division.memory(problem, cta_bytes)
    params = call.packed(num_splits=division.num_splits, **fields)
    return [Launch(kernel(problem.layout, heads, variant, problem.extra_layout), (ctas, 1, 1), params)]


# Times within a share of 64 heads, in hundredths of the time of a pair of tiles: Q and first rows of an item, its
# results, a partial result that is left, and one that is merged. Clocks in the kernel measured them.
SHARE_ITEM, SHARE_RESULTS, SHARE_LEFT, SHARE_MERGED = 96, 63, 56, 81
# Item costs from 0 to SHARE_COSTS - 1 are tried. If there are fewer items than shares, none above ITEM_COST is: CTAs
# then wait for partial results of others, which the times above leave out. An item cost replaces ITEM_COST if the
# slowest share gains SHARE_GAIN percent by it.
SHARE_COSTS, SHARE_GAIN = 21, 1


@lru_cache(maxsize=1024)
def item_cost(items: int, pairs: int, ctas: int) -> int:
    """The cost of an item beside its pairs with which the slowest share takes the least time.

    Shares end at whole pairs. The cost of an item decides which shares get one pair more than others.

    Args:
        items: work items of 64 heads.
        pairs: pairs of tiles of each.
        ctas: shares.
    """
    costs = np.arange(SHARE_COSTS if items >= ctas else ITEM_COST + 1)
    item, rest = even_shares(items, ctas)
    pair = nearest_pair(rest * (costs + PAIR_COST * pairs)[:, None] // ctas, costs[:, None])
    whole, begin, end = _boundary_times(pairs)
    slowest = ((item[1:] - item[:-1]) * whole + end[pair[:, 1:]] - begin[pair[:, :-1]]).max(axis=1)
    nearest = (slowest * SHARE_COSTS + abs(costs - ITEM_COST)).argmin()  # of equal ones that nearest to ITEM_COST
    return int(nearest) if 100 * slowest[nearest] < (100 - SHARE_GAIN) * slowest[ITEM_COST] else ITEM_COST


@lru_cache(maxsize=64)
def _boundary_times(pairs: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Times of an item of so many pairs, by the pairs before a boundary in it. An item is not cut nearer than
    LEAST_SPLIT pairs to its ends.

    Returns:
        the time of the whole item; the time of the item that the share which begins at the boundary is spared; the time
        of the item that the share which ends there takes.
    """
    pair, whole = np.arange(pairs + 1), 100 * pairs + SHARE_ITEM + SHARE_RESULTS
    first, last = pair < LEAST_SPLIT, pair > pairs - LEAST_SPLIT
    begin = np.where(first, 0, np.where(last, whole, 100 * pair - SHARE_MERGED))
    return whole, begin, np.where(first, 0, np.where(last, whole, 100 * pair + SHARE_ITEM + SHARE_LEFT))
