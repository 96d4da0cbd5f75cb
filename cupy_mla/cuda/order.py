"""The order in which queries of unequal lengths are worked on, by blocks that take several: `order_queries.cu`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..arrays import Array, Place
from ..recording import Packed
from .jit import Kernel


@lru_cache(maxsize=1)
def order_kernel() -> Kernel:
    """The kernel that orders queries; it depends on nothing."""
    return Kernel("attention/order_queries.cu", "order_queries", {}, threads=1024, archs=("90a",), target="90a")


def longest_first(place: Place, num_queries: int, params: Packed) -> Packed:
    """Struct Params with an order of the queries, those with the longest lists first, which a kernel makes of its
    main.lengths."""
    order = Array("order", place.empty((num_queries,), np.dtype(np.int32)))
    ordered = Packed(params.layout, (*params.values[:-1], order.ptr))
    order_kernel().launch(place, (1, 1, 1), ordered)
    return ordered
