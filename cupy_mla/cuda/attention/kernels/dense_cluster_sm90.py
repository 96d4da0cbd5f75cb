"""`kernels_cu/attention/dense_cluster_sm90.cu`: dense decode over few bf16 rows on Hopper, a cluster a work item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import repeat
from operator import ge
from typing import Any

from ....layouts import FP16_512, FP16_576, Layout
from ... import structs
from ...driver import MAX_CLUSTER
from ...kernel import Kernel
from ...paging import ceil_div
from ...program import Buffer, Launch, Plan, Program
from ...structs import Packed
from ..divide import HALF_PARTIAL_BYTES, Clusters, Division
from ..problem import DenseProblem
from ..times import Work
from . import bf16_cluster_sm90, bf16_sm90
from .work import Counted, in_rounds, rounds_of, split

LAYOUTS = (*bf16_sm90.LAYOUTS, FP16_576, FP16_512)  # the kernels of dense attention for 16-bit rows read these
LINES = bf16_cluster_sm90.HEADS  # of a work item: query tokens times heads
# Pairs of tiles that a CTA may have. Lengths are not known: with more, one long request among short ones would keep its
# CTAs busy while all others idle.
MOST_PAIRS = 8
SPILL_BYTES = 8  # once a work item


@cache
def kernel(layout: Layout, lines: int) -> Kernel:
    """The kernel for rows of one width and so many lines a work item."""
    return Kernel(
        "attention/dense_cluster_sm90.cu", structs.DENSE,
        {**bf16_sm90.defines(layout), "HEADS": lines, "MAX_CLUSTER": MAX_CLUSTER}, archs=("90a",),
        max_cluster=MAX_CLUSTER, overlaps=True, spill_bytes=SPILL_BYTES,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in LAYOUTS:
        for lines in LINES:
            yield kernel(layout, lines)


def serves(problem: DenseProblem) -> bool:
    """Aligned bf16 and float16 rows on Hopper, in at least two splits."""
    able = problem.on_hopper and problem.layout in LAYOUTS
    return able and not problem.batch_invariant and problem.num_splits != 1


def candidates(problem: DenseProblem) -> Iterator[Division]:
    """For each number of lines the largest clusters of which all run at a time."""
    yield from (division for lines in LINES for division in largest(problem, lines, LINES))


def largest(problem: DenseProblem, lines: int, kernel_lines: Sequence[int]) -> list[Clusters]:
    """The largest clusters, at least of two CTAs, of which all run at a time and each CTA may have a pair of tiles.

    None where half of the lines would be padding, or where a CTA may have more than MOST_PAIRS pairs.

    Args:
        lines: of a work item.
        kernel_lines: all numbers of lines that the kernel is built for.
    """
    prescribed, forced = problem.forced or problem.num_splits, problem.division != ""
    if lines > min(kernel_lines) and problem.lines <= lines // 2 and not forced:
        return []
    at_once = problem.gpu.clusters_at_once(bf16_cluster_sm90.cluster_kernel())
    most, items = min(problem.num_splits or MAX_CLUSTER, MAX_CLUSTER, max(2, problem.pairs)), problem.items(lines)
    n = max(sum(map(ge, at_once[:most], repeat(items))), 2 if forced else 1)  # larger clusters run in smaller numbers
    few = ceil_div(problem.pairs, n) <= MOST_PAIRS
    return [Clusters(lines, n, n)] if n > 1 and (few or prescribed) else []


def fits(problem: DenseProblem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    return division.heads in LINES and division.fits and division.splits == division.cluster > 1


def work(problem: DenseProblem, division: Any) -> Work:
    """The work of a division, see `work.py`."""
    return (division.heads,), *clusters(problem, division)


def clusters(problem: DenseProblem, division: Any) -> Counted:
    """What takes time where there is a cluster for each work item, and how much of it there is."""
    lines, splits = division.heads, division.splits
    items = problem.items(lines)
    names, amounts = split(problem, items * splits, splits, ceil_div(problem.pairs, splits), problem.lines > lines)
    rounds = rounds_of(items, problem.gpu.clusters_at_once(bf16_cluster_sm90.cluster_kernel())[splits - 1])
    return names, in_rounds(amounts, rounds)


def launches(problem: DenseProblem, division: Any, params: Packed, plan: Plan | None) -> Program:
    """The launch."""
    return in_clusters(kernel(problem.layout, division.heads), problem, params, division)


def in_clusters(attention: Kernel, problem: DenseProblem, params: Packed, division: Clusters) -> Program:
    """The launch of a kernel of this module or of `dense_fp8_sm90`: a cluster a work item."""
    ctas = problem.items(division.heads) * division.cluster
    memory = Buffer("partial results", shape=(ctas * division.heads * HALF_PARTIAL_BYTES,)).ptr
    return [Launch(attention, (ctas, 1, 1), params.replaced(cluster_parts=memory), division.cluster)]
