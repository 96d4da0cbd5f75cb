"""The portable kernel over rows of a block table: dense attention, any rows, any heads, any GPU from sm_80 on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from ....layouts import DENSE_LAYOUTS
from ... import structs
from ...kernel import Kernel
from ...program import Plan, Program
from ...structs import Packed
from .. import times
from ..divide import Clusters, Division, Shares, Whole
from ..problem import DenseProblem, Problem
from ..times import Work
from . import combine, portable

INVARIANT_SPLITS = 8  # of each request of a batch-invariant call
MOST_ROWS = 2**33  # of all items, of which shares can count the cost in 32 bits


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in DENSE_LAYOUTS:
        for heads in portable.HEADS:
            for limit in (portable.SMALL, portable.LARGE):
                yield portable.kernel(layout, heads, limit, dense=True)


def serves(problem: DenseProblem) -> bool:
    """Any call, on a GPU with as much shared memory as an A100."""
    return problem.gpu.shared_kb >= portable.LARGE


def candidates(problem: DenseProblem) -> Iterator[Division]:
    """The one that is to take the least time, or all of which one is asked for."""
    yield from divisions(problem, "portable", portable.work)


def fits(problem: DenseProblem, division: Any) -> bool:
    """Whether the kernel is built for a division of a kind that it has."""
    return portable.fits(as_sparse(problem, "portable"), division)


def work(problem: DenseProblem, division: Any) -> Work:
    """More than any kernel that is made for one GPU: how long it takes was not measured."""
    return (), (), (inf,)


def launches(problem: DenseProblem, division: Any, params: Packed, plan: Plan | None) -> Program:
    """The launch."""
    return launched(problem, division, params, "portable", portable.LARGE)


def launched(problem: DenseProblem, division: Any, params: Packed, name: str, limit: int) -> Program:
    """The launch of the kernel of that name, with so many KB of shared memory."""
    of = as_sparse(problem, name)
    kernel = portable.kernel(problem.layout, division.heads, limit, dense=True)
    lines = params.replaced(s_q=1, h_q=of.heads, num_queries=of.queries)
    launch = portable.launched(of, division, lines, kernel)
    if division.num_splits == 1:
        return [launch]
    # The merge knows queries and their heads, of which partial results stand in the same order as those of lines.
    queries = of._replace(heads=problem.heads, queries=problem.requests * problem.tokens)
    merging = launch.params.part(structs.ATTENTION).replaced(
        s_q=problem.tokens, h_q=queries.heads, num_queries=queries.queries
    )
    return [launch, combine.launch(queries, merging)]


def as_sparse(problem: DenseProblem, name: str) -> Problem:
    """The problem as one of index lists with lengths. A query is a request, its heads are the request's lines, query
    tokens times heads; a list names all rows that there may be."""
    return Problem(
        problem.gpu, problem.layout, False, problem.tokens * problem.heads, problem.requests, problem.rows,
        uneven=True, aligned=problem.aligned, num_splits=problem.num_splits, kernel=name, division=problem.division,
    )  # fmt: skip


def divisions(problem: DenseProblem, name: str, of_sparse: Callable[[Problem, Any], Work]) -> list[Division]:
    """Those of the kernel of that name, the least time first, where one is asked for; else the first of these, as all
    requests being as long as the table allows would have it.

    They may not be. So whole items are shares instead: the GPU then finds out by the lengths which items it cuts.

    Args:
        of_sparse: the work of a division over index lists.
    """
    of = as_sparse(problem, name)
    heads = portable.block_heads(of.heads)
    if problem.batch_invariant and not problem.num_splits:
        return [Clusters(heads, INVARIANT_SPLITS, 1)]
    found = sorted(portable.candidates(of), key=lambda way: times.microseconds(of.gpu, name, of_sparse(of, way)))
    if problem.division:
        return found
    if problem.num_splits:
        return found[:1]
    if of.items(heads) * problem.rows > MOST_ROWS:
        return [Whole(heads)]
    return [Shares(heads)] if isinstance(found[0], Whole) else found[:1]
