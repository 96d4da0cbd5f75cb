"""`kernels_cu/attention/few_heads_sm90.cu`: V32_FP8 and bf16 rows on Hopper, 8, 16 or 32 heads of a query at a time.

Rows may be split over the CTAs of a cluster, over partial results, or both; those of V32_FP8 in decode of up to 16
heads may be divided evenly over all CTAs. V4_FP8 is faster on `fp8_sm90`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ...layouts import BF16_512, BF16_576, D_V, V32_FP8, Layout
from .. import structs
from ..driver import MAX_CLUSTER
from ..kernel import Kernel
from ..paging import ceil_div
from ..program import Launch, Program
from .call import Call
from .cost import FEW_CONSUMERS, UNEVEN_ITEM_COST

LAYOUTS = (BF16_576, BF16_512, V32_FP8)  # that the kernel can read
HEADS = tuple(FEW_CONSUMERS)  # heads a CTA is built for
TILE_ROWS = 64

SHARES, SPLITS = 2, 5  # how work is divided over CTAs: kernels_cu/attention/division/division.cuh
EVEN_HEADS = (8, 16)  # heads a CTA that takes an equal share is built for
MOST_SHARES = 144  # CTAs among which rows are divided evenly: there is space for the weights of as many results


@cache
def block_heads(h_q: int) -> int:
    """Heads of a CTA, for a call with `h_q` heads."""
    return next((heads for heads in HEADS if h_q <= heads), max(HEADS))


@cache
def kernel(layout: Layout, heads: int, evenly: bool = False) -> Kernel:
    """The kernel for one cache layout and heads of a CTA; `evenly`: all rows are divided over the CTAs."""
    defines = {
        **layout.defines(), "D_V": D_V, "HEADS": heads, "TILE_ROWS": TILE_ROWS, "CONSUMERS": FEW_CONSUMERS[heads],
        "MAX_CLUSTER": MAX_CLUSTER, "DIVISION": SHARES if evenly else SPLITS, "MOST_SHARES": MOST_SHARES,
        "UNEVEN_ITEM_COST": UNEVEN_ITEM_COST["few_heads_sm90"],
    }  # fmt: skip
    return Kernel(
        "attention/few_heads_sm90.cu", structs.ATTENTION, defines, archs=("90a",), target="90a",
        max_cluster=1 if evenly else MAX_CLUSTER, overlaps=True,
    )  # fmt: skip


@cache
def cluster_kernel(heads: int) -> Kernel:
    """The variant that is asked how many clusters run at a time; a CTA of every variant takes a whole SM."""
    return kernel(V32_FP8, heads)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in LAYOUTS:
        for heads in HEADS:
            yield kernel(layout, heads)
    for heads in EVEN_HEADS:
        yield kernel(V32_FP8, heads, True)


def launches(call: Call, heads: int, cluster: int, partials: int, ctas: int) -> Program:
    """The launch: a cluster a query, a partial result and a tile of heads; or so many CTAs, a share each."""
    if ctas:
        return [Launch(kernel(call.layout, heads, True), (ctas, 1, 1), call.params)]
    grid = (call.queries * cluster, partials, ceil_div(call.h_q, heads))
    return [Launch(kernel(call.layout, heads), grid, call.params, cluster)]
