"""`kernels_cu/attention/bf16_few_heads_sm90.cu`: bf16 rows on Hopper, 8, 16 or 32 heads of one or two queries a CTA."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ....layouts import D_V, Layout
from ... import structs
from ...driver import MAX_CLUSTER
from ...kernel import Kernel
from ...program import Launch, Program
from ..call import Call
from ..divide import PARTIAL_BYTES, Division, Whole
from ..problem import TILE_ROWS, Problem
from ..times import Work
from . import bf16_sm90, combine
from .few_heads_sm90 import HEADS, block_heads, of_splits, splits_of
from .lists import longest_first
from .work import whole

CONSUMERS = 2  # consumer warpgroups of a CTA


@cache
def kernel(layout: Layout, heads: int, queries: int) -> Kernel:
    """The kernel for bf16 rows of one width, heads and queries (1 or 2) of a CTA."""
    defines = {
        **layout.defines(), "D_V": D_V, "HEADS": heads, "TILE_ROWS": TILE_ROWS, "QUERIES": queries,
        "MAX_CLUSTER": MAX_CLUSTER,
    }  # fmt: skip
    return Kernel(
        "attention/bf16_few_heads_sm90.cu", structs.ATTENTION, defines, archs=("90a",), target="90a",
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
    return problem.on_hopper and problem.layout in bf16_sm90.LAYOUTS and not problem.fixed


def candidates(problem: Problem) -> Iterator[Division]:
    """Whole items, two of them a CTA where there are more than SMs, clusters, and partial results for `combine.cu`.

    Not for more than 32 heads over flat rows that fill the GPU; nor splits of more than 16 over any flat rows.
    """
    heads = block_heads(problem.heads)
    many = problem.items(heads) > problem.gpu.sms
    if not problem.asks and problem.flat and not problem.num_splits and problem.heads > 16:
        if not many:
            yield Whole(heads)
            yield Whole(16)
    else:
        yield from splits_of(problem, heads, clusters=problem.prefill or not problem.flat)
        if problem.heads > 16 and not many:
            yield from splits_of(problem, 16)
    if (many or problem.division) and problem.num_splits <= 1 and problem.heads <= max(HEADS):
        yield Whole(heads, queries=2)


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for a division of a kind that it has."""
    if isinstance(division, Whole):
        return division.heads in HEADS and division.queries in (1, 2) and not division.counted
    return division.heads in HEADS and division.fits


def work(problem: Problem, division: Any) -> Work:
    """What takes time in a division, see `work.py`."""
    kind, words = "clusters", (division.heads, problem.phase, problem.lists)
    if isinstance(division, Whole):
        if division.queries == 2:
            twos = -(-problem.items(division.heads) // 2)
            return ("two queries", *words), *whole(problem, twos, problem.pairs)
        kind = "whole"
    return (kind, *words), *of_splits(problem, division, CONSUMERS)


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch: a cluster a work item and partial result; or, with two queries a CTA, CTAs that take pairs in turn,
    those with the longest lists first."""
    heads, items = division.heads, problem.items(division.heads)
    if isinstance(division, Whole) and division.queries == 2:
        order, params = longest_first(problem, call.params) if problem.uneven else (None, call.params)
        launch = Launch(kernel(problem.layout, heads, 2), (problem.gpu.sms, 1, 1), params)
        return [order, launch] if order else [launch]
    cluster, splits = (1, 1) if isinstance(division, Whole) else (division.cluster, division.num_splits)
    memory = {} if isinstance(division, Whole) else division.memory(problem, heads * PARTIAL_BYTES)
    params = call.params.replaced(num_splits=splits, **memory)
    launch = Launch(kernel(problem.layout, heads, 1), (items * cluster, splits, 1), params, cluster)
    return [launch, combine.launch(problem, params)] if splits > 1 else [launch]
