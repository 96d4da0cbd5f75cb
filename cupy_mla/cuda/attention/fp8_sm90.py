"""`kernels_cu/attention/fp8_sm90.cu`: FP8 rows on Hopper, 32 or 64 heads of a query at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ...layouts import ATTENTION_LAYOUTS, D_V, V32_FP8, Layout
from ...sizes import least
from .. import structs
from ..driver import MAX_CLUSTER
from ..kernel import Kernel
from ..paging import ceil_div
from ..program import Launch, Program
from .call import Call

HEADS = (32, 64)  # heads a CTA is built for
TILE_ROWS = 64

SPILL_BYTES = 64  # a few words of addresses, once a work item


@cache
def kernel(layout: Layout, heads: int, merges: bool) -> Kernel:
    """The kernel for one cache layout and heads of a CTA; `merges`: the splits of a query are CTAs of a cluster."""
    defines = {
        **layout.defines(), "D_V": D_V, "HEADS": heads, "TILE_ROWS": TILE_ROWS, "MERGES": int(merges),
        "MAX_CLUSTER": MAX_CLUSTER,
    }  # fmt: skip
    return Kernel(
        "attention/fp8_sm90.cu", structs.ATTENTION, defines, archs=("90a",), target="90a", spill_bytes=SPILL_BYTES,
        max_cluster=MAX_CLUSTER if merges else 1, overlaps=True,
    )  # fmt: skip


@cache
def cluster_kernel() -> Kernel:
    """The variant that is asked how many clusters run at a time; a CTA of every variant takes a whole SM."""
    return kernel(V32_FP8, max(HEADS), True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in ATTENTION_LAYOUTS:
        if layout.quantized:
            for heads in HEADS:
                for merges in (False, True):
                    yield kernel(layout, heads, merges)


def launches(call: Call, heads: int, splits: int, cluster: int, uneven: bool) -> Program:
    """The launch: a cluster a query, or CTAs that take work items in turn.

    Args:
        uneven: queries have lengths of their own. Then each CTA has one work item, for an even load.
    """
    head_tiles = ceil_div(call.h_q, heads)
    if cluster > 1:
        grid = (call.queries * cluster, head_tiles, 1)
        return [Launch(kernel(call.layout, heads, True), grid, call.params, cluster)]
    items = call.queries * head_tiles * splits
    ctas = items if uneven else least(items, call.gpu.sms)
    return [Launch(kernel(call.layout, heads, False), (ctas, 1, 1), call.params)]
