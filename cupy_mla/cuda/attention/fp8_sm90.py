"""`kernels_cu/attention/fp8_sm90.cu`: FP8 rows on Hopper, 32 or 64 heads of a query at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ...layouts import D_V, V4_FP8, V32_FP8, Layout
from .. import structs
from ..driver import MAX_CLUSTER
from ..kernel import Kernel
from ..program import Launch, Program
from .call import Call
from .cost import UNEVEN_ITEM_COST

LAYOUTS = (V32_FP8, V4_FP8)  # that the kernel can read
HEADS = (32, 64)  # heads a CTA is built for
TILE_ROWS = 64


WHOLE, CLUSTERS, SHARES, SEGMENTS, TEAMS = DIVISIONS = 0, 1, 2, 3, 4  # how work is divided over CTAs, see the kernel
MOST_SPLITS = 256  # of a work item in shares: as many partial results a CTA merges
# Addresses, one of them a tile, too.
SPILL_BYTES = {WHOLE: 0, CLUSTERS: 0, SHARES: 0, SEGMENTS: 20, TEAMS: 0}


@cache
def kernel(layout: Layout, heads: int, division: int) -> Kernel:
    """The kernel for one cache layout, heads of a CTA, and one of `DIVISIONS`."""
    defines = {
        **layout.defines(), "D_V": D_V, "HEADS": heads, "TILE_ROWS": TILE_ROWS, "DIVISION": division,
        "MAX_CLUSTER": MAX_CLUSTER, "MOST_SPLITS": MOST_SPLITS, "UNEVEN_ITEM_COST": UNEVEN_ITEM_COST["fp8_sm90"],
    }  # fmt: skip
    return Kernel(
        "attention/fp8_sm90.cu", structs.ATTENTION, defines, archs=("90a",), target="90a",
        spill_bytes=SPILL_BYTES[division], max_cluster=MAX_CLUSTER if division == CLUSTERS else 1, overlaps=True,
    )  # fmt: skip


@cache
def cluster_kernel() -> Kernel:
    """The variant that is asked how many clusters run at a time; a CTA of every variant takes a whole SM."""
    return kernel(V32_FP8, max(HEADS), CLUSTERS)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in LAYOUTS:
        for heads in HEADS:
            for division in DIVISIONS:
                yield kernel(layout, heads, division)


def division_of(splits: int, ctas: int, teams: bool = False) -> int:
    """Which of `DIVISIONS` so many splits of an item are, and CTAs among which the work is divided."""
    if teams:
        return TEAMS
    if not ctas:
        return CLUSTERS
    if splits == 1:
        return WHOLE
    return SEGMENTS if 1 < splits <= MAX_CLUSTER else SHARES


def launches(call: Call, heads: int, splits: int, cluster: int, ctas: int, teams: bool) -> Program:
    """The launch: a cluster a query and head tile, or so many CTAs among which the work is divided."""
    division = division_of(splits, ctas, teams)
    if division != CLUSTERS:
        return [Launch(kernel(call.layout, heads, division), (ctas, 1, 1), call.params)]
    grid = (call.items(heads) * cluster, 1, 1)
    return [Launch(kernel(call.layout, heads, CLUSTERS), grid, call.params, cluster)]
