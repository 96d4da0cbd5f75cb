"""`kernels_cu/attention/portable.cu`: any rows, any heads, any GPU from sm_80 on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ...layouts import ATTENTION_LAYOUTS, D_V, Layout
from .. import structs
from ..kernel import PORTABLE, Kernel
from ..program import Launch, Program
from .call import Call
from .cost import UNEVEN_ITEM_COST

HEADS = (16, 32, 64)  # heads a CTA is built for
SMALL, LARGE = 99, 163  # KB of shared memory that a CTA of each shape may have: sm_86, 89, 120, 121; sm_80, 90, 100
STEP_ROWS = 32  # rows of a step, in which `cost.py` counts
PLACES = 2  # for partial results of a CTA, where rows are divided evenly
LEAST_SPLIT = 2  # pairs of tiles that a split has at least there


class Shape(NamedTuple):
    """Rows of a tile, and slices of Q that a warp holds in shared memory instead of registers."""

    tile_rows: int
    q_in_shared: int


# Of 64 heads: by kind of scales and width of the rows, and shared memory. FITS is for any other rows.
SHAPES = {
    ("none", 576, SMALL): Shape(16, 4), ("none", 576, LARGE): Shape(32, 6),
    ("none", 512, SMALL): Shape(16, 4), ("none", 512, LARGE): Shape(32, 6),
    ("fp32", 576, SMALL): Shape(16, 6), ("fp32", 576, LARGE): Shape(32, 7),
    ("ue8m0", 512, SMALL): Shape(16, 3), ("ue8m0", 512, LARGE): Shape(32, 6),
}  # fmt: skip
FITS = Shape(16, 4)


@cache
def block_heads(h_q: int) -> int:
    """Heads of a CTA, for a call with `h_q` heads."""
    return next((heads for heads in HEADS if h_q <= heads), max(HEADS))


def shape(layout: Layout, heads: int, limit: int) -> Shape:
    """Tile and Q of a kernel that has `limit` KB of shared memory."""
    if heads == max(HEADS):
        return SHAPES.get((layout.scale_kind, layout.d_qk, limit), FITS)
    return Shape(32 if limit == LARGE else 16, 0)


@cache
def kernel(layout: Layout, heads: int, limit: int) -> Kernel:
    """The kernel for one cache layout, heads of a CTA, and KB of shared memory."""
    rows, q_in_shared = shape(layout, heads, limit)
    defines = {
        **layout.defines(), "D_V": D_V, "HEADS": heads, "TILE_ROWS": rows, "Q_IN_SHARED": q_in_shared,
        "SHARED_LIMIT": 1024 * limit, "UNEVEN_ITEM_COST": UNEVEN_ITEM_COST["portable"],
    }  # fmt: skip
    archs = PORTABLE if limit == SMALL else ("80", "90", "100")
    return Kernel("attention/portable.cu", structs.ATTENTION, defines, archs=archs)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in ATTENTION_LAYOUTS:
        for heads in HEADS:
            for limit in (SMALL, LARGE):
                yield kernel(layout, heads, limit)


def launches(call: Call, heads: int, partials: int, ctas: int, limit: int) -> Program:
    """The launch: a CTA for each work item and split, or so many CTAs among which all rows are divided evenly."""
    grid = (ctas, 1, 1) if ctas else (call.items(heads), partials, 1)
    return [Launch(kernel(call.layout, heads, limit), grid, call.params)]
