"""`kernels_cu/attention/dense_sm90.cu` and `dense_combine.cu`: dense decode over bf16 rows on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ....layouts import BF16_576, Layout
from ... import structs
from ...kernel import Kernel
from ...paging import ceil_div
from ...program import Launch, Program, Slot
from ...structs import Packed
from ..problem import DenseProblem
from ..divide import CUT_COST, HALF_PARTIAL_BYTES
from ..problem import TILE_ROWS
from . import bf16_sm90

LINES = bf16_sm90.HEADS  # of a work item: query tokens times heads
COMBINERS = 8  # CTAs of dense_combine.cu an SM, at most
UNEVEN_ITEM_COST = 8  # what an item costs beside its rows, in eighths of a pair of tiles
LEAST_SPLIT = 1  # pairs of tiles
MOST_SPLITS = 256  # of a request's rows
MOST_PARTIALS = 512  # of an item: no GPU has more SMs
INVARIANT_SPLITS = 8  # of each request in a batch-invariant call
SPILL_BYTES = 36  # a few words, once a work item


def _kernel(file: str, layout: Layout) -> Kernel:
    defines = {
        **bf16_sm90.defines(layout), "UNEVEN_ITEM_COST": UNEVEN_ITEM_COST, "MOST_PARTIALS": MOST_PARTIALS,
    }  # fmt: skip
    return Kernel(
        f"attention/{file}.cu", structs.DENSE, defines, archs=("90a",), target="90a", spill_bytes=SPILL_BYTES,
        overlaps=True,
    )  # fmt: skip


@cache
def kernel(layout: Layout) -> Kernel:
    """The kernel for rows of one width."""
    return _kernel("dense_sm90", layout)


@cache
def combine() -> Kernel:
    """What merges its partial results, which do not depend on the width of rows."""
    return _kernel("dense_combine", BF16_576)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in bf16_sm90.LAYOUTS:
        yield kernel(layout)
    yield combine()


def serves(problem: DenseProblem) -> bool:
    """Aligned bf16 rows on Hopper."""
    return problem.gpu.capability == 90 and problem.aligned and problem.layout in bf16_sm90.LAYOUTS


def launches(problem: DenseProblem, params: Packed) -> Program:
    """The launch, a share a CTA, and that which merges items that are cut."""
    lines = problem.tokens * problem.heads
    items = problem.requests * ceil_div(lines, LINES)
    splits = problem.num_splits or (INVARIANT_SPLITS if problem.batch_invariant else 1)
    pairs = ceil_div(problem.capacity, 2 * TILE_ROWS)
    shares = items * splits if splits > 1 else max(1, min(problem.gpu.sms, items * max(1, pairs)))
    places = shares if splits > 1 else 2 * shares
    memory = Slot("partial results", shape=(places * LINES * HALF_PARTIAL_BYTES + 16 * shares,)).ptr
    params = params.replaced(
        s_q=1, h_q=lines, num_queries=problem.requests, num_splits=splits, cluster_parts=memory,
        plan=memory + places * LINES * HALF_PARTIAL_BYTES, least_split=LEAST_SPLIT, cut_cost=shares * CUT_COST,
        whole_items=ceil_div(items, shares) * shares, num_shares=shares,
    )  # fmt: skip
    merged = min(COMBINERS * problem.gpu.sms, min(items, shares) * min(lines, LINES))
    return [
        Launch(kernel(problem.layout), (shares, 1, 1), params), Launch(combine(), (merged, 1, 1), params),
    ]  # fmt: skip
