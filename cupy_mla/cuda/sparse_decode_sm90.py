"""The Hopper kernel for FP8 rows: `kernels_cu/attention/fp8_sm90.cu`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, lru_cache

from ..arrays import Place
from ..layouts import ATTENTION_LAYOUTS, V32_FP8, Layout
from ..recording import Packed
from .jit import MAX_CLUSTER, SM90_SHARED_BYTES, Kernel, num_sms
from .schedule import Shape, cheapest

HEADS = (32, 64)  # heads a block is built for
TILE_ROWS, UNIT_ROWS = 64, 16
UNITS_A_TILE = TILE_ROWS // UNIT_ROWS

# Microseconds on an H200, by the heads a block, fitted to 2048 rows, batch 1 to 64; of two numbers the second is added
# in proportion as blocks fill the GPU. A block besides its rows (Q, first rows, results), a pair of tiles, a cluster's
# merge; combine.cu's launch, and 1000 heads' parts in it.
BLOCK_TIME, PAIR_TIME = {32: (4.0, 6.0), 64: (7.0, 0.0)}, {32: 3.0, 64: 4.1}
MERGE_TIME = {32: (3.4, -3.0), 64: (3.5, 5.0)}
COMBINE_TIME, PART_TIME = 4.0, {32: 0.3, 64: 1.0}

# A few words of addresses go to local memory, once a piece of work.
SPILL_BYTES = 64


def fixed_bytes(layout: Layout, heads: int) -> int:
    """Shared memory a block without the ring: Q, two P, statistics and what a row's scales become."""
    chunks = layout.num_scales
    lines = heads * 128
    small = heads * 4 * (1 + 2 + 8 + 1) + 2 * 4 + 2 * 8 + 8 * 4 + 2 * chunks * TILE_ROWS * 2
    return (layout.d_nope // 64 + 1 + 2) * lines + small


def unit_bytes(layout: Layout) -> int:
    """Shared memory of 16 rows, and of their barriers and validity bits."""
    return UNIT_ROWS * (layout.row_stride + (16 if layout.scales_apart else 0)) + 2 * 8 + 4


def units(layout: Layout, heads: int) -> int:
    """Units of 16 rows of the ring, whole tiles: three take no longer than what more there is space for."""
    space = (SM90_SHARED_BYTES - 16 - fixed_bytes(layout, heads)) // unit_bytes(layout)
    return space // UNITS_A_TILE * UNITS_A_TILE


def shared_bytes(layout: Layout, heads: int) -> int:
    """Shared memory a block."""
    used = fixed_bytes(layout, heads) + units(layout, heads) * unit_bytes(layout)
    return -(-used // 16) * 16


@cache
def kernel(layout: Layout, heads: int, merges: bool) -> Kernel:
    """The kernel for one cache layout and heads a block; `merges`: the blocks of a cluster are a query's splits."""
    shared = shared_bytes(layout, heads)
    defines = {"D_V": 512, "HEADS": heads, "TILE_ROWS": TILE_ROWS, "MERGES": int(merges), "MAX_CLUSTER": MAX_CLUSTER}
    return Kernel(
        "attention/fp8_sm90.cu",
        "fp8_sm90",
        {**layout.defines(), **defines},
        threads=384,
        shared_bytes=shared,
        archs=("90a",),
        target="90a",
        spill_bytes=SPILL_BYTES,
        max_cluster=MAX_CLUSTER if merges else 1,
        overlaps=True,
    )


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in ATTENTION_LAYOUTS:
        if layout.quantized:
            for heads in HEADS:
                for merges in (False, True):
                    yield kernel(layout, heads, merges)


@lru_cache(maxsize=4096)
def best_shape(h_q: int, queries: int, tiles: int, at_once: tuple[int, ...], splits: int | None) -> Shape:
    """`schedule.cheapest` by this kernel's times."""

    def block_time(shape: Shape, full: float) -> float:
        pairs = math.ceil(math.ceil(tiles / shape.splits) / 2)
        alone, more = BLOCK_TIME[shape.heads]
        work = alone + more * full + PAIR_TIME[shape.heads] * pairs
        if shape.cluster > 1:
            alone, more = MERGE_TIME[shape.heads]
            work += alone + more * full
        return work

    def combine_time(shape: Shape, parts: float) -> float:
        return COMBINE_TIME + PART_TIME[shape.heads] * parts

    return cheapest(HEADS, tiles, splits, h_q, queries, at_once, block_time, combine_time)


def shape_of(place: Place, h_q: int, num_queries: int, rows: int, num_splits: int | None) -> Shape:
    """`best_shape` for a call whose queries have up to `rows` rows."""
    at_once = kernel(V32_FP8, max(HEADS), True).clusters_at_once(place.device)  # a block takes a whole multiprocessor
    return best_shape(h_q, num_queries, -(-rows // TILE_ROWS), at_once, num_splits)


def launch(
    place: Place, layout: Layout, shape: Shape, h_q: int, num_queries: int, uneven: bool, params: Packed
) -> None:
    """Launch for a call whose packed Params say `shape.parts`.

    Args:
        uneven: queries have lengths of their own, so that blocks should not take several in a fixed order.
    """
    head_tiles = -(-h_q // shape.heads)
    if shape.cluster > 1:
        grid = (num_queries * shape.cluster, head_tiles, 1)
        kernel(layout, shape.heads, True).launch(place, grid, params, shape.cluster)
    else:
        work = num_queries * head_tiles * shape.splits
        blocks = work if uneven else min(work, num_sms(place.device))
        kernel(layout, shape.heads, False).launch(place, (blocks, 1, 1), params)
