"""`kernels_cu/attention/bf16_few_heads_sm90.cu`: bf16 rows on Hopper, 8, 16 or 32 heads of one or two queries a CTA."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ...layouts import BF16_512, BF16_576, D_V, Layout
from .. import structs
from ..driver import MAX_CLUSTER
from ..kernel import Kernel
from ..program import Launch, Program
from .call import Call
from .few_heads_sm90 import HEADS, TILE_ROWS
from .lists import longest_first


@cache
def kernel(layout: Layout, heads: int, queries: int) -> Kernel:
    """The kernel for bf16 rows of one width, heads and queries (1 or 2) of a CTA."""
    defines = {
        **layout.defines(), "D_V": D_V, "HEADS": heads, "TILE_ROWS": TILE_ROWS, "QUERIES": queries,
        "MAX_CLUSTER": MAX_CLUSTER,
    }  # fmt: skip
    return Kernel(
        "attention/bf16_few_heads_sm90.cu", structs.ATTENTION, defines, archs=("90a",), target="90a",
        max_cluster=MAX_CLUSTER, overlaps=queries == 1,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in (BF16_576, BF16_512):
        for heads in HEADS:
            for queries in (1, 2):
                yield kernel(layout, heads, queries)


def launches(call: Call, heads: int, queries: int, cluster: int, partials: int, ordered: bool) -> Program:
    """The launch: a cluster a work item and partial result; or, with two queries a CTA, CTAs that take pairs in turn.

    Args:
        ordered: CTAs that take several queries begin with those that have the longest lists.
    """
    items = call.items(heads)
    if queries == 1:
        return [Launch(kernel(call.layout, heads, 1), (items * cluster, partials, 1), call.params, cluster)]
    order, params = longest_first(call) if ordered else (None, call.params)
    launch = Launch(kernel(call.layout, heads, 2), (call.gpu.sms, 1, 1), params)
    return [order, launch] if order else [launch]
