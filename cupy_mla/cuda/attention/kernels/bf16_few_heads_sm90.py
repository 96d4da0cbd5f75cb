"""`kernels_cu/attention/bf16_few_heads_sm90.cu`: bf16 rows on Hopper, 8, 16 or 32 heads of one or two queries a CTA.

A query's rows may be split over the CTAs of a cluster, over partial results, or both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ....layouts import D_V, Layout
from ... import structs
from ...driver import MAX_CLUSTER
from ...kernel import Kernel
from ...paging import fitting
from ...program import Launch, Program
from ..call import Call
from ..divide import PARTIAL_BYTES, Clusters, Division, Whole, largest_cluster, split_numbers
from ..problem import TILE_ROWS, Problem
from ..times import Work
from . import bf16_cluster_sm90, bf16_sm90, combine
from .lists import longest_first
from .work import Counted, own_and_shared, rounds_of, whole

CONSUMERS = 2  # consumer warpgroups of a CTA
HEADS = (8, 16, 32)  # heads a CTA is built for
INVARIANT_ROWS = 512  # of a split of a batch-invariant call
# What takes time in whole items and splits.
AMOUNTS = own_and_shared(
    (
        "launch", "items", "tiles", "rounds", "mean", "mean tiles", "load", "tiles at load", "merges", "combine",
        "results",
    ), "mean tiles", "tiles at load",
)  # fmt: skip


@cache
def kernel(layout: Layout, heads: int, queries: int) -> Kernel:
    """The kernel for bf16 rows of one width, heads and queries (1 or 2) of a CTA."""
    defines = {
        **layout.defines(), "D_V": D_V, "HEADS": heads, "TILE_ROWS": TILE_ROWS, "QUERIES": queries,
        "MAX_CLUSTER": MAX_CLUSTER,
    }  # fmt: skip
    return Kernel(
        "attention/bf16_few_heads_sm90.cu", structs.ATTENTION, defines, archs=("90a",),
        max_cluster=MAX_CLUSTER, overlaps=queries == 1,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in bf16_sm90.LAYOUTS:
        for heads in HEADS:
            for queries in (1, 2):
                yield kernel(layout, heads, queries)


def serves(problem: Problem) -> bool:
    """bf16 rows."""
    return problem.on_hopper and problem.layout in bf16_sm90.LAYOUTS


def candidates(problem: Problem) -> Iterator[Division]:
    """Whole items, splits in clusters, splits that `combine.cu` merges, and two queries a CTA where items fill the GPU.

    With more than 16 heads over flat rows only whole items that do not fill the GPU: otherwise other kernels are
    faster.
    """
    heads, fixed = fitting(HEADS, problem.heads), problem.fixed_kernel
    many = problem.items(heads) > problem.gpu.sms
    if problem.flat and problem.heads > 16 and not (problem.forced or problem.num_splits or fixed):
        if not many:
            yield Whole(heads)
            yield Whole(16)
    else:
        yield from _splits(problem, heads)
        if problem.heads > 16 and not many:
            yield from _splits(problem, 16)
    if (many or problem.division) and problem.num_splits <= 1 and problem.heads <= max(HEADS) and not fixed:
        yield Whole(heads, queries=2)


def _splits(problem: Problem, heads: int) -> Iterator[Division]:
    """Whole items and splits, of CTAs with so many heads."""
    asked, sms, items = problem.splits(INVARIANT_ROWS), problem.gpu.sms, problem.items(heads)
    if asked <= 1:
        yield Whole(heads)
    if asked == 1 and not problem.division:
        return
    at_once = problem.gpu.clusters_at_once(bf16_cluster_sm90.cluster_kernel())
    found = [*split_numbers(problem.tiles, max(3, sms // max(1, items)))]  # 2 and 3 even if they take several rounds
    numbers = [asked] if asked > 1 else found[-3:] or ([2] if problem.division else [])
    for n in numbers:
        cluster = largest_cluster(n)
        if n in numbers[-2:]:
            yield Clusters(heads, n, 1)
        if cluster > 1 and (asked or problem.division or items * n // cluster <= at_once[cluster - 1]):
            yield Clusters(heads, n, cluster)


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    if isinstance(division, Whole):
        return division.heads in HEADS and division.queries in (1, 2)
    return division.heads in HEADS and division.fits


def work(problem: Problem, division: Any) -> Work:
    """The work of a division, see `work.py`."""
    kind, words = "clusters", (division.heads, problem.phase, problem.lists)
    if isinstance(division, Whole):
        if division.queries == 2:
            twos = -(-problem.items(division.heads) // 2)
            return ("two queries", *words), *whole(problem, twos, problem.pairs)
        kind = "whole"
    return (kind, *words), *_counted(problem, division)


def _counted(problem: Problem, division: Any) -> Counted:
    """What takes time in whole items or splits.

    A GPU runs so many clusters in `turns`. An amount "rounds" counts tiles that the consumer warpgroups of a CTA
    multiply at the same time.
    """
    splits, cluster = (1, 1) if isinstance(division, Whole) else (division.splits, division.cluster)
    partials, each = splits // cluster, -(-problem.tiles // splits)
    clusters = problem.items(division.heads) * partials
    at_once = problem.gpu.clusters_at_once(bf16_cluster_sm90.cluster_kernel())[cluster - 1]
    turns = rounds_of(clusters, at_once)
    last = min(1.0, max(0.0, clusters * cluster / problem.gpu.sms - turns + 1))  # part of the GPU in the last turn
    mean, load = turns - 1 + last, turns - 1 + last**2
    results = problem.queries * problem.heads * partials / 1000 if partials > 1 else 0
    return AMOUNTS[problem.heads > division.heads], (
        1, turns, turns * each, turns * -(-each // CONSUMERS), mean, mean * each, load, load * each,
        turns * (cluster > 1), partials > 1, results,
    )  # fmt: skip


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch. With two queries a CTA, the CTAs take pairs of queries in turn, those with the longest lists first.
    Otherwise there is a cluster for each partial result of each item."""
    heads, items = division.heads, problem.items(division.heads)
    if isinstance(division, Whole) and division.queries == 2:
        order, params = longest_first(problem, call.packed()) if problem.uneven else (None, call.packed())
        launch = Launch(kernel(problem.layout, heads, 2), (problem.gpu.sms, 1, 1), params)
        return [order, launch] if order else [launch]
    cluster, splits = (1, 1) if isinstance(division, Whole) else (division.cluster, division.num_splits)
    memory = {} if isinstance(division, Whole) else division.memory(problem, heads * PARTIAL_BYTES)
    params = call.packed(num_splits=splits, **memory)
    launch = Launch(kernel(problem.layout, heads, 1), (items * cluster, splits, 1), params, cluster)
    return [launch, combine.launch(problem, params)] if splits > 1 else [launch]
