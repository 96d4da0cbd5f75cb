"""The portable kernel over rows of a block table: dense attention, any rows, any heads, any GPU from sm_80 on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from ....layouts import DENSE_LAYOUTS
from ... import structs
from ...kernel import Kernel
from ...paging import fitting
from ...program import Plan, Program
from ...structs import Packed
from .. import times
from ..divide import Clusters, Division, Shares, Whole
from ..problem import DenseProblem, Problem
from ..times import Work
from . import combine, dense_cluster_sm90, dense_fp8_sm90, portable

ON_HOPPER = {*dense_cluster_sm90.LAYOUTS, *dense_fp8_sm90.LAYOUTS}  # the kernels for Hopper read these
INVARIANT_SPLITS = 8  # of each request of a batch-invariant call
MOST_ROWS = 2**33  # of all items together: shares add up their cost in 32 bits


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in DENSE_LAYOUTS:
        for heads in portable.HEADS:
            for limit in (portable.SMALL, portable.LARGE):
                yield portable.kernel(layout, heads, limit, dense=True)


def serves(problem: DenseProblem) -> bool:
    """Any call that kernels for Hopper do not serve, on a GPU with as much shared memory as an A100."""
    return problem.gpu.shared_kb >= portable.LARGE and (problem.forced or not on_hopper(problem))


def on_hopper(problem: DenseProblem) -> bool:
    """Whether kernels for Hopper serve a call."""
    return problem.on_hopper and problem.layout in ON_HOPPER


def candidates(problem: DenseProblem) -> Iterator[Division]:
    """See `divisions`."""
    yield from divisions(problem, "portable", portable.work)


def fits(problem: DenseProblem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    return portable.fits(as_sparse(problem, "portable"), division)


def work(problem: DenseProblem, division: Any) -> Work:
    """The time was not measured."""
    return (), (), (inf,)


def launches(problem: DenseProblem, division: Any, params: Packed, plan: Plan | None) -> Program:
    """The launch."""
    return program(problem, division, params, "portable", portable.LARGE)


def program(problem: DenseProblem, division: Any, params: Packed, name: str, limit: int) -> Program:
    """The launch of the kernel of that name, with so many KB of shared memory, and the merge of its splits."""
    sparse = as_sparse(problem, name)
    kernel = portable.kernel(problem.layout, division.heads, limit, dense=True)
    launch = portable.launch(sparse, division, params, kernel)
    if division.num_splits == 1:
        return [launch]
    # `combine` works on query tokens and their heads. Their partial results stand in the same order as those of lines.
    queries = sparse._replace(heads=problem.heads, queries=problem.requests * problem.tokens)
    merging = launch.params.part(structs.ATTENTION).replaced(
        s_q=problem.tokens, h_q=queries.heads, num_queries=queries.queries
    )
    return [launch, combine.launch(queries, merging)]


def as_sparse(problem: DenseProblem, name: str) -> Problem:
    """The problem as one of index lists with lengths: each request is a query, whose heads are the request's lines and
    whose list names all rows that the request may have."""
    return Problem(
        problem.gpu, problem.layout, False, problem.tokens * problem.heads, problem.requests, problem.rows,
        uneven=True, aligned=problem.aligned, num_splits=problem.num_splits, kernel=name, division=problem.division,
    )  # fmt: skip


def divisions(problem: DenseProblem, name: str, sparse_work: Callable[[Problem, Any], Work]) -> list[Division]:
    """The division that takes the least time; where a division is forced, all, the least time first.

    Times are those of requests that are as long as the block table allows. Others may be short, and whole items then
    unequal. So shares take the place of whole items: on the GPU they are divided by the lengths.

    Args:
        name: of the kernel.
        sparse_work: its `work` over index lists.
    """
    sparse = as_sparse(problem, name)
    heads = fitting(portable.HEADS, sparse.heads)
    if problem.batch_invariant and not problem.num_splits:
        return [Clusters(heads, INVARIANT_SPLITS, 1)]

    def us(division: Division) -> float:
        return times.microseconds(sparse.gpu, name, sparse_work(sparse, division))

    found = sorted(portable.candidates(sparse), key=us)
    if problem.division:
        return found
    if problem.num_splits:
        return found[:1]
    if sparse.items(heads) * problem.rows > MOST_ROWS:
        return [Whole(heads)]
    return [Shares(heads)] if isinstance(found[0], Whole) else found[:1]
