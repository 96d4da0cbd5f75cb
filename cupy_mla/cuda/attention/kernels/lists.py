"""What is done to index lists before attention: entries counted, queries ordered by length, lists sorted by place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ....dtypes import INT32
from ... import structs
from ...kernel import Kernel
from ...paging import ceil_div
from ...program import Buffer, Launch
from ...structs import Packed
from ..problem import Problem

SEGMENT, RANGES = 2048, 32  # entries that a CTA sorts, and the number of ranges of the cache that it sorts them by
COUNTED = 4  # queries whose entries a CTA counts


@lru_cache(maxsize=1)
def order_kernel() -> Kernel:
    """The kernel that orders queries; it depends on nothing."""
    return Kernel("attention/order_queries.cu", structs.ATTENTION, {}, archs=("90a",), target="90a")


@lru_cache(maxsize=1)
def sort_kernel() -> Kernel:
    """The kernel that sorts lists; it depends on nothing."""
    defines = {"SEGMENT": SEGMENT, "RANGES": RANGES}
    return Kernel("attention/sort_lists.cu", structs.SORT, defines, archs=("90a",), target="90a")


@lru_cache(maxsize=1)
def count_kernel() -> Kernel:
    """The kernel that counts the entries of lists; it depends on nothing."""
    return Kernel("attention/count_entries.cu", structs.COUNT, {"QUERIES": COUNTED}, archs=("90a",), target="90a")


def counted(problem: Problem, params: Packed) -> tuple[Launch, Packed]:
    """Count the entries of main lists up to the last valid one, for queries that are requests of their own.

    Returns:
        the launch that does so, and the parameters with the counts as main.lengths.
    """
    counts = Buffer("entries that count", shape=(problem.queries,), dtype=INT32)
    launch = Launch(
        count_kernel(), (ceil_div(problem.queries, COUNTED), 1, 1), structs.COUNT(params, counts=counts.ptr)
    )
    return launch, params.replaced(**{"main.lengths": counts.ptr})


def longest_first(problem: Problem, params: Packed) -> tuple[Launch, Packed]:
    """Order the queries, those with the longest lists first, by main.lengths of struct AttentionParams.

    Returns:
        the launch that does so, and the parameters with the order.
    """
    ordered = params.replaced(order=Buffer("order", shape=(problem.queries,), dtype=INT32).ptr)
    return Launch(order_kernel(), (1, 1, 1), ordered), ordered


def sorted_by_place(problem: Problem, params: Packed, num_slots: int) -> tuple[Launch, Packed]:
    """Copy the main lists, their entries sorted by the range of the cache they name.

    Returns:
        the launch that does so, and the parameters with the copies.
    """
    queries, topk = problem.queries, problem.entries
    lists = Buffer("sorted lists", shape=(queries, topk), dtype=INT32)
    segments = ceil_div(topk, SEGMENT)
    shift = max((num_slots - 1).bit_length() - (RANGES - 1).bit_length(), 0)
    sorting = structs.SORT(params, sorted=lists.ptr, segments=segments, shift=shift)
    launch = Launch(sort_kernel(), (queries * segments, 1, 1), sorting)
    fields = {"main.indices": lists.ptr, "main.index_stride_b": topk, "main.index_stride_s": 0}
    return launch, params.replaced(**fields)


def kernels() -> Iterator[Kernel]:
    """Every kernel of this module, for the compile tests and for warming up."""
    yield count_kernel()
    yield order_kernel()
    yield sort_kernel()
