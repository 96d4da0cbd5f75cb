"""`kernels_cu/attention/few_heads_sm90.cu`: bf16 rows on Hopper, 8, 16 or 32 heads of a query at a time.

Rows may be split over the CTAs of a cluster, over partial results, or both. FP8 rows are faster on `fp8_sm90`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ....layouts import BF16_512, BF16_576, D_V, Layout
from ... import structs
from ...driver import MAX_CLUSTER
from ...kernel import Kernel
from ...paging import ceil_div
from ...program import Launch, Program
from ..call import Call
from ..divide import PARTIAL_BYTES, Clusters, Division, Whole, largest_cluster, split_numbers
from ..problem import TILE_ROWS, Problem
from ..times import Work
from . import combine
from .work import Counted, rounds_of

LAYOUTS = (BF16_576, BF16_512)  # that the kernel can read
CONSUMERS = {8: 3, 16: 3, 32: 2}  # consumer warpgroups of a CTA, by its heads
HEADS = tuple(CONSUMERS)  # heads a CTA is built for
INVARIANT_ROWS = 512  # of a split of a batch-invariant call

SPLITS = 5  # how work is divided over CTAs: kernels_cu/attention/division/division.cuh
# What takes time in whole items and splits: where a CTA reads rows of its own, and where several read the same.
AMOUNTS = tuple(
    (
        "launch", "items", "tiles", "rounds", "mean", f"{of}mean tiles", "load", f"{of}tiles at load", "merges",
        "combine", "results",
    ) for of in ("", "shared ")
)  # fmt: skip


@cache
def block_heads(h_q: int) -> int:
    """Heads of a CTA, for a call with `h_q` heads."""
    return next((heads for heads in HEADS if h_q <= heads), max(HEADS))


@cache
def kernel(layout: Layout, heads: int) -> Kernel:
    """The kernel for one cache layout and heads of a CTA."""
    defines = {
        **layout.defines(), "D_V": D_V, "HEADS": heads, "TILE_ROWS": TILE_ROWS, "CONSUMERS": CONSUMERS[heads],
        "MAX_CLUSTER": MAX_CLUSTER, "DIVISION": SPLITS,
    }  # fmt: skip
    return Kernel(
        "attention/few_heads_sm90.cu", structs.ATTENTION, defines, archs=("90a",), target="90a",
        max_cluster=MAX_CLUSTER, overlaps=True,
    )  # fmt: skip


@cache
def cluster_kernel(heads: int) -> Kernel:
    """The variant that is asked how many clusters run at a time; a CTA of every variant takes a whole SM."""
    return kernel(BF16_576, heads)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in LAYOUTS:
        for heads in HEADS:
            yield kernel(layout, heads)


def serves(problem: Problem) -> bool:
    """bf16 rows."""
    return problem.on_hopper and problem.layout in LAYOUTS


def candidates(problem: Problem) -> Iterator[Division]:
    """Whole items, clusters, and partial results for `combine.cu`; of flat rows clusters alone.

    Not for more than 16 heads over flat rows: other kernels are faster.
    """
    if problem.heads > 16 and problem.flat and not (problem.asks or problem.fixed):
        return
    yield from splits_of(problem, block_heads(problem.heads), apart=not problem.flat)
    if problem.heads > 16:
        yield from splits_of(problem, 16, apart=not problem.flat)


def splits_of(problem: Problem, heads: int, apart: bool = True, clusters: bool = True) -> Iterator[Division]:
    """Whole items, and splits with so many heads a CTA, of this kernel and of `bf16_few_heads_sm90`.

    Args:
        apart: whole items, and splits that leave partial results for `combine.cu`, too. clusters: those, too. Where
            the caller asks for something, all are offered.
    """
    every = problem.asks or problem.fixed or problem.num_splits > 0
    asked, sms, items = problem.splits(INVARIANT_ROWS), problem.gpu.sms, problem.items(heads)
    if asked <= 1 and (apart or every):
        yield Whole(heads)
    if asked == 1 and not problem.division:
        return
    at_once = problem.gpu.clusters_at_once(cluster_kernel(heads))
    found = [*split_numbers(problem.tiles, max(3, sms // max(1, items)))]  # two and three in several rounds, too
    numbers = [asked] if asked > 1 else found[-3:] or [2][: bool(problem.division)]
    for n in numbers:
        cluster = largest_cluster(n)
        if n in numbers[-2:] and (apart or every):
            yield Clusters(heads, n, 1)
        if (
            cluster > 1
            and (clusters or every)
            and (asked or problem.division or items * n // cluster <= at_once[cluster - 1])
        ):
            yield Clusters(heads, n, cluster)


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for a division of a kind that it has."""
    return division.heads in HEADS and (
        division == Whole(division.heads) if isinstance(division, Whole) else division.fits
    )


def work(problem: Problem, division: Any) -> Work:
    """What takes time in a division, see `work.py`."""
    heads, kind = division.heads, "whole" if isinstance(division, Whole) else "clusters"
    return (problem.layout.name, kind, heads, problem.phase), *of_splits(problem, division, CONSUMERS[heads])


def of_splits(problem: Problem, division: Any, consumers: int) -> Counted:
    """What takes time in whole items, or splits with so many consumer warpgroups a CTA.

    A round is a tile for each of them.
    """
    splits, cluster = (1, 1) if isinstance(division, Whole) else (division.splits, division.cluster)
    partials, each = splits // cluster, -(-problem.tiles // splits)
    clusters = problem.items(division.heads) * partials
    at_once = problem.gpu.clusters_at_once(cluster_kernel(division.heads))[cluster - 1]
    turns = rounds_of(clusters, at_once)
    last = min(1.0, max(0.0, clusters * cluster / problem.gpu.sms - turns + 1))  # how full the last round is
    mean, load = turns - 1 + last, turns - 1 + last**2
    results = problem.queries * problem.heads * partials / 1000 if partials > 1 else 0
    return AMOUNTS[problem.heads > division.heads], (
        1, turns, turns * each, turns * -(-each // consumers), mean, mean * each, load, load * each,
        turns * (cluster > 1), partials > 1, results,
    )  # fmt: skip


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch: a cluster a query, a partial result and a tile of heads."""
    heads, each = division.heads, division.heads * PARTIAL_BYTES
    cluster, splits = (1, 1) if isinstance(division, Whole) else (division.cluster, division.num_splits)
    memory = {} if isinstance(division, Whole) else division.memory(problem, each)
    params = call.params.replaced(num_splits=splits, **memory)
    grid = (problem.queries * cluster, splits, ceil_div(problem.heads, heads))
    launch = Launch(kernel(problem.layout, heads), grid, params, cluster)
    return [launch, combine.launch(problem, params)] if splits > 1 else [launch]
