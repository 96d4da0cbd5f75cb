"""`kernels_cu/attention/dense_sm90.cu`: dense decode over bf16 and float16 rows on Hopper, all rows in equal shares."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ....layouts import Layout
from ... import structs
from ...kernel import Kernel
from ...paging import ceil_div
from ...program import Launch, Program, Slot
from ...structs import Packed
from ..divide import CUT_COST, HALF_PARTIAL_BYTES
from ..problem import DenseProblem
from . import bf16_sm90, dense_combine
from .dense_cluster_sm90 import LAYOUTS, PAIR_US, memory_us

LINES = bf16_sm90.HEADS  # of a work item: query tokens times heads
UNEVEN_ITEM_COST = 8  # what an item costs beside its rows, in eighths of a pair of tiles
LEAST_SPLIT = 1  # pairs of tiles
INVARIANT_SPLITS = 8  # of each request in a batch-invariant call


@cache
def kernel(layout: Layout) -> Kernel:
    """The kernel for rows of one width."""
    defines = {**bf16_sm90.defines(layout), "UNEVEN_ITEM_COST": UNEVEN_ITEM_COST}
    return Kernel("attention/dense_sm90.cu", structs.DENSE, defines, archs=("90a",), target="90a", overlaps=True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in LAYOUTS:
        yield kernel(layout)


def serves(problem: DenseProblem) -> bool:
    """Aligned bf16 and float16 rows on Hopper."""
    return problem.on_hopper and problem.layout in LAYOUTS


def us(problem: DenseProblem) -> float:
    """What the call is to take if all requests are as long as they may be, in microseconds."""
    items, sms = problem.items(LINES), problem.gpu.sms
    pairs = items * problem.pairs
    compute = PAIR_US * pairs / min(sms, pairs)
    return 14.0 + 6.5 * min(1.0, problem.lines / LINES) + 1.5 * items / sms + max(compute, memory_us(problem))


def launches(problem: DenseProblem, params: Packed) -> Program:
    """The launch, a share a CTA, and that which merges items that are cut."""
    items = problem.items(LINES)
    splits = problem.num_splits or (INVARIANT_SPLITS if problem.batch_invariant else 1)
    shares = items * splits if splits > 1 else min(problem.gpu.sms, items * problem.pairs)
    nbytes = (shares if splits > 1 else 2 * shares) * LINES * HALF_PARTIAL_BYTES
    memory = Slot("partial results", shape=(nbytes + 16 * shares,)).ptr
    params = params.replaced(
        s_q=1, h_q=problem.lines, num_queries=problem.requests, num_splits=splits, cluster_parts=memory,
        plan=memory + nbytes, least_split=LEAST_SPLIT, cut_cost=shares * CUT_COST,
        whole_items=ceil_div(items, shares) * shares, num_shares=shares,
    )  # fmt: skip
    merge = dense_combine.launch(
        dense_combine.kernel(half=problem.layout.half),
        params,
        min(items, shares) * min(problem.lines, LINES),
        problem.gpu.sms,
    )
    return [Launch(kernel(problem.layout), (shares, 1, 1), params), merge]
