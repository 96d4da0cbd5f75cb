"""What is done to index lists before attention: queries ordered by length, lists sorted by place."""

from __future__ import annotations

from collections.abc import Iterator

from ....dtypes import INT32
from ... import structs
from ...kernel import Kernel
from ...paging import ceil_div
from ...program import Buffer, Launch
from ...structs import Packed
from ..problem import Problem

SEGMENT, RANGES = 2048, 32  # entries that a CTA sorts, and ranges of the cache by which it sorts them

ORDER_KERNEL = Kernel("attention/order_queries.cu", structs.ATTENTION, {}, archs=("90a",))
SORT_KERNEL = Kernel(
    "attention/sort_lists.cu", structs.SORT, {"SEGMENT": SEGMENT, "RANGES": RANGES}, archs=("90a",),
)  # fmt: skip


def longest_first(problem: Problem, params: Packed) -> tuple[Launch, Packed]:
    """Order the queries by `main.lengths` of `struct AttentionParams`, those with the longest lists first.

    Returns:
        the launch that does so, and the parameters with the order.
    """
    ordered = params.replaced(order=Buffer("order", shape=(problem.queries,), dtype=INT32).ptr)
    return Launch(ORDER_KERNEL, (1, 1, 1), ordered), ordered


def sorted_by_place(problem: Problem, params: Packed, main: Packed, num_slots: int) -> tuple[Launch, Packed]:
    """Copy the main lists with their entries sorted by the range of the cache that they name.

    Args:
        main: `struct Source` of `params`.

    Returns:
        the launch that does so, and `main` with the copies.
    """
    queries, topk = problem.queries, problem.entries
    lists = Buffer("sorted lists", shape=(queries, topk), dtype=INT32)
    segments = ceil_div(topk, SEGMENT)
    shift = max((num_slots - 1).bit_length() - (RANGES - 1).bit_length(), 0)
    sorting = structs.SORT(params, sorted=lists.ptr, segments=segments, shift=shift)
    launch = Launch(SORT_KERNEL, (queries * segments, 1, 1), sorting)
    return launch, main.replaced(indices=lists.ptr, index_stride_b=topk, index_stride_s=0)


def kernels() -> Iterator[Kernel]:
    """Every kernel of this module, for the compile tests and for warming up."""
    yield from (ORDER_KERNEL, SORT_KERNEL)
