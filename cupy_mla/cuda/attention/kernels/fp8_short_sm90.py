"""`kernels_cu/attention/fp8_short_sm90.cu`: V4_FP8 rows on Hopper, 32 or 64 heads of a query at a time, short lists."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ....layouts import V4_FP8
from ... import structs
from ...kernel import Kernel
from ...paging import ceil_div
from ...program import Launch, Program
from ..call import Call
from ..divide import HALF_PARTIAL_BYTES, Clusters, Division, Whole
from ..problem import Problem
from ..times import Work
from . import fp8_sm90
from .work import split, whole

HEADS = (32, 64)  # heads a CTA is built for
LARGEST_CLUSTER = 8  # CTAs
TILES = 4  # of 64 rows, that a CTA holds; kernels_cu/attention/fp8_short_sm90.cu


@cache
def kernel(heads: int, meet: bool) -> Kernel:
    """The kernel for so many heads of a CTA; `meet`: each item has a cluster."""
    made = fp8_sm90.defines(V4_FP8, heads, fp8_sm90.WHOLE)
    return Kernel(
        "attention/fp8_short_sm90.cu", structs.ATTENTION,
        {**made, "MAX_CLUSTER": LARGEST_CLUSTER, "SPLITS_MEET": int(meet)},
        archs=("90a",), target="90a", max_cluster=LARGEST_CLUSTER if meet else 1, overlaps=True,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for heads in HEADS:
        for meet in (False, True):
            yield kernel(heads, meet)


def serves(problem: Problem) -> bool:
    """Decode over V4_FP8 rows of both caches, whose bits depend on no batch; not where splits are asked for."""
    able = problem.on_hopper and problem.layout == V4_FP8 and problem.extra_layout in (None, V4_FP8)
    return able and not problem.prefill and not problem.fixed and problem.num_splits <= 1


def candidates(problem: Problem) -> Iterator[Division]:
    """Whole items, where the lists are short enough; else clusters, if all of them run at a time."""
    for heads in HEADS if problem.heads > min(HEADS) or problem.asks else HEADS[:1]:
        if problem.tiles <= TILES:
            yield Whole(heads)
        if problem.division:
            yield Clusters(heads, 2, 2)
        if problem.num_splits == 1:
            continue
        at_once, items = problem.gpu.clusters_at_once(fp8_sm90.cluster_kernel()), problem.items(heads)
        for n in range(max(2, ceil_div(problem.tiles, TILES)), min(problem.tiles, LARGEST_CLUSTER) + 1):
            if at_once[n - 1] >= items:
                yield Clusters(heads, n, n)


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for a division of a kind that it has."""
    if isinstance(division, Whole):
        return problem.tiles <= TILES and division in map(Whole, HEADS)
    within = 1 < division.splits <= LARGEST_CLUSTER and problem.tiles <= TILES * division.splits
    return division.heads in HEADS and division.splits == division.cluster and within


def work(problem: Problem, division: Any) -> Work:
    """What takes time in a division, see `work.py`."""
    heads, splits, shared = division.heads, 1, problem.heads > division.heads
    if isinstance(division, Clusters):
        splits = division.splits
        each = ceil_div(problem.tiles, splits)
        counted = split(problem, problem.items(heads) * splits, splits, each / 2, shared)
    else:
        counted = whole(problem, problem.items(heads), problem.tiles / 2, shared)
    return (problem.layout.name, "whole" if splits == 1 else "clusters", heads, problem.lists), *counted


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch: for each tile of heads so many CTAs, which take queries in turn; or a cluster for each item."""
    heads, tiles = division.heads, ceil_div(problem.heads, division.heads)
    if isinstance(division, Clusters):
        memory = division.memory(problem, heads * HALF_PARTIAL_BYTES)
        params = call.params.replaced(num_splits=1, **call.ended(), **memory)
        return [Launch(kernel(heads, True), (tiles * division.cluster, problem.queries, 1), params, division.cluster)]
    ctas = min(problem.queries, max(problem.gpu.sms // tiles, 1))
    params = call.params.replaced(num_splits=1, **call.ended())
    return [Launch(kernel(heads, False), (tiles, ctas, 1), params)]
