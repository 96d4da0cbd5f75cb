"""`kernels_cu/attention/bf16_cluster_sm90.cu`: as `bf16_sm90`, a query's rows split over the CTAs of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ....layouts import BF16_576, Layout
from ... import structs
from ...driver import MAX_CLUSTER
from ...kernel import Kernel
from ...program import Launch, Program
from ..call import Call
from ..divide import HALF_PARTIAL_BYTES, Clusters, Division
from ..problem import Problem
from ..times import Work
from . import bf16_sm90
from .work import cluster_splits, in_rounds, rounds_of, split

HEADS = (16, 32, bf16_sm90.HEADS)  # of a work item
INVARIANT_ROWS = 16  # of a split of a batch-invariant call, which only gets this kernel where it is forced


@cache
def kernel(layout: Layout, heads: int) -> Kernel:
    """The kernel for rows of one width and so many heads a work item."""
    return Kernel(
        "attention/bf16_cluster_sm90.cu", structs.ATTENTION,
        {**bf16_sm90.defines(layout), "HEADS": heads, "MAX_CLUSTER": MAX_CLUSTER}, archs=("90a",),
        max_cluster=MAX_CLUSTER, overlaps=True,
    )  # fmt: skip


@cache
def cluster_kernel() -> Kernel:
    """The variant that `Gpu.clusters_at_once` is asked about. A CTA of every variant takes a whole SM."""
    return kernel(BF16_576, bf16_sm90.HEADS)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in bf16_sm90.LAYOUTS:
        for heads in HEADS:
            yield kernel(layout, heads)


def serves(problem: Problem) -> bool:
    """Flat bf16 rows, in at least two splits."""
    flat = problem.flat and problem.layout in bf16_sm90.LAYOUTS
    return problem.on_hopper and flat and not problem.fixed_kernel and problem.num_splits != 1


def candidates(problem: Problem) -> Iterator[Division]:
    """Clusters of the largest sizes of which all run at a time."""
    asked = min(problem.splits(INVARIANT_ROWS), MAX_CLUSTER)
    at_once = problem.gpu.clusters_at_once(cluster_kernel())
    for heads in HEADS:
        if heads > HEADS[0] and problem.heads <= heads // 2 and not problem.division:
            continue  # more padding than heads
        found = [asked] if asked else cluster_splits(problem, problem.items(heads), problem.pairs, at_once)
        for n in found or ([2] if problem.forced else ()):
            yield Clusters(heads, n, n)


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    return division.heads in HEADS and division.fits and division.splits == division.cluster > 1


def work(problem: Problem, division: Any) -> Work:
    """The work of a division, see `work.py`."""
    heads, splits, pairs = division.heads, division.splits, problem.pairs
    items = problem.items(heads)
    names, amounts = split(problem, items * splits, splits, -(-pairs // splits), problem.heads > heads)
    rounds = rounds_of(items, problem.gpu.clusters_at_once(cluster_kernel())[splits - 1])
    return (heads, problem.phase, problem.lists), names, in_rounds(amounts, rounds)


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch: a cluster a work item."""
    heads, cluster = division.heads, division.cluster
    memory = division.memory(problem, heads * HALF_PARTIAL_BYTES)
    params = call.packed(num_splits=division.num_splits, **memory)
    return [Launch(kernel(problem.layout, heads), (problem.items(heads) * cluster, 1, 1), params, cluster)]
