"""What is done to a call's index lists before attention: in which order queries are worked on, and lists read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ..arrays import Array, Place
from ..recording import Packed, Params
from .jit import Kernel

# Entries that are sorted together, and parts of the cache; kernels_cu/attention/sort_lists.cu
SEGMENT, PARTS = 2048, 32

_INDICES, _INDEX_STRIDE_B, _INDEX_STRIDE_S = 1, 5, 6  # fields of struct Params; the last is `order`


@lru_cache(maxsize=1)
def order_kernel() -> Kernel:
    """The kernel that orders queries; it depends on nothing."""
    return Kernel("attention/order_queries.cu", "order_queries", {}, threads=1024, archs=("90a",), target="90a")


@lru_cache(maxsize=1)
def sort_kernel() -> Kernel:
    """The kernel that sorts lists; it depends on nothing."""
    return Kernel("attention/sort_lists.cu", "sort_lists", {"SEGMENT": SEGMENT, "RANGES": PARTS}, threads=128, archs=("90a",), target="90a")


def longest_first(place: Place, num_queries: int, params: Packed) -> tuple[Packed, Array]:
    """Order the queries, those with the longest lists first, by main.lengths of struct Params.

    Returns:
        struct Params with the order, and the memory it lies in, to be kept until the launch that reads it.
    """
    order = Array("order", place.empty((num_queries,), np.dtype(np.int32)))
    ordered = Packed(params.layout, (*params.values[:-1], order.ptr))
    order_kernel().launch(place, (1, 1, 1), ordered)
    return ordered, order


def sorted_by_place(place: Place, num_queries: int, topk: int, num_slots: int, params: Packed) -> tuple[Packed, Array]:
    """Copy the main lists, their entries sorted by the part of the cache they name.

    Returns:
        struct Params with the copies, and the memory they lie in, to be kept until the last launch that reads it.
    """
    lists = Array("sorted", place.empty((num_queries, topk), np.dtype(np.int32)))
    segments, shift = -(-topk // SEGMENT), max((num_slots - 1).bit_length() - (PARTS - 1).bit_length(), 0)
    layout = Params(params.layout.struct.format + "Q2i")
    sort_kernel().launch(place, (num_queries * segments, 1, 1), layout.pack(*params.values, lists.ptr, segments, shift))
    values = list(params.values)
    values[_INDICES], values[_INDEX_STRIDE_B], values[_INDEX_STRIDE_S] = lists.ptr, topk, 0
    return Packed(params.layout, tuple(values)), lists


def kernels() -> Iterator[Kernel]:
    """Every kernel of this module, for the compile tests and for warming up."""
    yield order_kernel()
    yield sort_kernel()
