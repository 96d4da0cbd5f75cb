"""`kernels_cu/attention/bf16_grouped_sm90.cu`: prefill of few heads on Hopper, in groups of neighbouring queries.

Three launches. `group_lists.cu` unites the index lists of the queries of a group: as many neighbouring queries as fill
a tile of 64 heads. This kernel works on the groups whose lists share enough rows. Another kernel works on the queries
that are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ....dtypes import INT32
from ....layouts import Layout
from ... import structs
from ...kernel import Kernel
from ...paging import ceil_div, fitting, pointer
from ...program import Buffer, Launch, Program
from ..call import SOME_DONE, Call
from ..divide import Division, Whole
from ..problem import Problem
from ..times import Work
from . import bf16_few_heads_sm90, bf16_sm90
from .lists import sorted_by_place
from .work import shares

MAX_QUERIES = 8  # of a group
MAX_HEADS = 32  # of a call
QUERIES_PER_SM = 16  # so many queries' lists `group_lists.cu` unites on an SM at a time
# Up to so many heads `bf16_few_heads_sm90` serves the queries that are left, with more `bf16_sm90`.
REST_FEW_HEADS = 16

# A group is faster than its queries one by one where the union has at most this share of the lists' entries. Measured:
# a list entry takes 0.74 of the time of a row of the union on `bf16_few_heads_sm90`, and 0.95 on `bf16_sm90`. The
# limits lie between the shares of random lists, so that all groups of such a call go one way. These shares are, with 4
# and with 16 rows of the cache for each entry: 0.43 and 0.79 (groups of 8), 0.63 and 0.89 (of 4), 0.79 and 0.94 (of 2).
MOST_ROWS_FEW_HEADS, MOST_ROWS = 0.71, 0.86

LEAST_BUSY = 0.5  # the part of the GPU that groups must keep busy
FEW = 0.75  # of the number of SMs: fewer groups than that are few

# The least sm_scale: a row is masked by a logit of -2^120, which must still be far below all others when it is scaled.
LEAST_SCALE = 2.0**-60

# The lists that are left are sorted where the cache has more bytes than L2 holds.
SORTED_CACHE_BYTES = 1 << 26

SCRATCH_BYTES = 1 << 28  # for the united lists of one launch, about


@cache
def group_queries(h_q: int) -> int:
    """Queries of a group."""
    return min(bf16_sm90.HEADS // h_q, MAX_QUERIES)


@cache
def kernel(layout: Layout) -> Kernel:
    """The kernel for rows of one width."""
    return Kernel(
        "attention/bf16_grouped_sm90.cu", structs.GROUPED, {**bf16_sm90.defines(layout), "MAX_QUERIES": MAX_QUERIES},
        archs=("90a",),
    )  # fmt: skip


@cache
def group_lists_kernel(queries: int) -> Kernel:
    """The kernel that unites the index lists of so many queries; it does not depend on the layout."""
    defines = {
        "QUERIES": queries, "CTAS_PER_SM": QUERIES_PER_SM // queries, "MAX_QUERIES": MAX_QUERIES,
        "TILE_ROWS": bf16_sm90.TILE_ROWS,
    }  # fmt: skip
    return Kernel("attention/group_lists.cu", structs.GROUPED, defines, archs=("90a",))


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for queries in sorted({group_queries(h_q) for h_q in range(1, MAX_HEADS + 1)}):
        yield group_lists_kernel(queries)
    for layout in bf16_sm90.LAYOUTS:
        yield kernel(layout)


def serves(problem: Problem) -> bool:
    """Prefill of few heads over bf16 rows, unsplit."""
    few = problem.prefill and problem.heads <= MAX_HEADS and problem.num_splits <= 1
    return problem.on_hopper and few and problem.groupable and problem.layout in bf16_sm90.LAYOUTS


def busy(problem: Problem) -> float:
    """The part of the GPU that groups keep busy, as the mean over all rounds of CTAs."""
    groups, sms = ceil_div(problem.queries, group_queries(problem.heads)), problem.gpu.sms
    return groups / (ceil_div(groups, sms) * sms)


def candidates(problem: Problem) -> Iterator[Division]:
    """Groups, where they keep half of the GPU busy."""
    if problem.forced or busy(problem) >= LEAST_BUSY:
        yield Whole(bf16_sm90.HEADS, queries=group_queries(problem.heads))


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    return division == Whole(bf16_sm90.HEADS, queries=group_queries(problem.heads))


def work(problem: Problem, division: Any) -> Work:
    """The work of a division: the mean of calls where some queries are grouped and others are not. Calls of few groups
    are of another kind: they were measured without locality, so that nearly no query is grouped."""
    items = ceil_div(problem.queries, division.queries)
    measured = 8 if division.queries >= 8 else 4 if division.queries >= 4 else 2
    few = items < FEW * problem.gpu.sms
    return ("few" * few, "groups of", measured), *shares(problem, items)


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launches for groups, and for the queries that are left.

    Without lengths the grids are the same for any number of queries, so one CUDA graph serves them all.
    """
    queries, sms, topk = division.queries, problem.gpu.sms, problem.entries
    limit = MOST_ROWS_FEW_HEADS if problem.heads <= REST_FEW_HEADS else MOST_ROWS
    most_rows = 1.0 if problem.kernel else min(limit, busy(problem))
    capacity = queries * topk
    total = ceil_div(problem.queries, queries)
    twice_words = ceil_div(capacity, bf16_sm90.TILE_ROWS) * queries  # 64-bit words of a group in `twice`
    sizes = (8 * twice_words, 4 * capacity, 4, capacity)  # bytes of a group in twice, rows, group_lengths, excluded
    groups = min(total, max(SCRATCH_BYTES // sum(sizes), 1))  # of a launch
    united = Buffer("united lists", shape=(groups * sum(sizes),))
    twice, rows, group_lengths, excluded = (united.ptr + groups * sum(sizes[:i]) for i in range(4))
    left = Buffer("lengths of what is left", shape=(problem.queries,), dtype=INT32)
    main, flags = call.fields["main"].replaced(lengths=left.ptr), call.fields["flags"] | SOME_DONE
    call = call._replace(fields={**call.fields, "main": main, "flags": flags})
    params = call.packed()
    steps: list[Launch] = []
    for first in range(0, total, groups):
        here = min(total - first, groups)
        grouped = structs.GROUPED(
            params, list_lengths=pointer(call.lengths), rows=rows, excluded=excluded, twice=twice,
            group_lengths=group_lengths, left=left.ptr, queries=queries, first_group=first, num_groups=here,
            capacity=capacity, twice_capacity=twice_words, most=most_rows,
        )  # fmt: skip
        steps.append(Launch(group_lists_kernel(queries), (QUERIES_PER_SM // queries * sms, 1, 1), grouped))
        ctas = here if call.lengths is not None else sms
        steps.append(Launch(kernel(problem.layout), (ctas, 1, 1), grouped))
    if topk > 0 and 2 * problem.layout.d_qk * call.num_slots > SORTED_CACHE_BYTES:
        sort, main = sorted_by_place(problem, params, main, call.num_slots)
        steps.append(sort)
    return [*steps, *_rest(problem, call._replace(fields={**call.fields, "main": main}))]


def _rest(problem: Problem, call: Call) -> Program:
    """The launches for the queries that are left."""
    if problem.heads > REST_FEW_HEADS:
        return bf16_sm90.launches(problem, Whole(bf16_sm90.HEADS), call)
    heads = fitting(bf16_few_heads_sm90.HEADS, problem.heads)
    two = problem.items(heads) > problem.gpu.sms
    return bf16_few_heads_sm90.launches(problem, Whole(heads, queries=1 + two), call)
