"""The Hopper kernel for FP8 rows: `kernels_cu/attention/sparse_decode_sm90.cu`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, lru_cache

from ..arrays import Place
from ..layouts import ATTENTION_LAYOUTS, D_V, V32_FP8, Layout
from ..recording import Packed
from .jit import MAX_CLUSTER, SM90_SHARED_BYTES, Kernel, num_sms

HEADS = (32, 64)  # heads a block is built for
TILE_ROWS, UNIT_ROWS = 64, 16
PART_BYTES = 4 * D_V + 16  # of a head, in what blocks merge; kernels_cu/attention/cluster_merge.cuh

# Microseconds on an H200, fitted to 2048 rows and batch 1 to 128: what a block takes besides its rows (Q, first rows,
# results), a pair of tiles by the heads a block, and a round of a cluster's merge, see merge_rounds.
BLOCK_TIME, PAIR_TIME, ROUND_TIME = 9.2, {32: 3.9, 64: 4.6}, 0.6

# A few words of addresses go to local memory, once a piece of work or once a tile.
SPILL_BYTES = 192


def fixed_bytes(layout: Layout, heads: int) -> int:
    """Shared memory a block without the ring: Q, two P, statistics and what a row's scales become."""
    chunks = layout.num_scales
    lines = heads * 128
    small = heads * 4 * (1 + 2 + 8 + 1) + 2 * 4 + 8 * 4 + 2 * TILE_ROWS * 4 + 2 * chunks * TILE_ROWS * 2
    return (layout.d_nope // 64 + 1 + 2) * lines + small


def unit_bytes(layout: Layout) -> int:
    """Shared memory of 16 rows, and of their barriers and validity bits."""
    return UNIT_ROWS * (layout.row_stride + (16 if layout.scales_apart else 0)) + 2 * 8 + 4


def units(layout: Layout, heads: int) -> int:
    """Units of 16 rows that the ring has space for."""
    return (SM90_SHARED_BYTES - 16 - fixed_bytes(layout, heads)) // unit_bytes(layout)


def shared_bytes(layout: Layout, heads: int) -> int:
    """Shared memory a block."""
    used = fixed_bytes(layout, heads) + units(layout, heads) * unit_bytes(layout)
    return -(-used // 16) * 16


@cache
def kernel(layout: Layout, heads: int, merges: bool) -> Kernel:
    """The kernel for one cache layout and heads a block; `merges`: the blocks of a cluster are a query's splits."""
    shared = shared_bytes(layout, heads)
    defines = {"HEADS": heads, "MERGES": int(merges), "UNITS": units(layout, heads), "EXPECTED_SHARED_BYTES": shared}
    return Kernel(
        "attention/sparse_decode_sm90.cu",
        "sparse_decode",
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


def cluster_of(num_splits: int) -> int:
    """Blocks of a cluster: a query's splits, if a cluster holds them; else they are merged by a launch of its own."""
    return num_splits if num_splits <= MAX_CLUSTER else 1


def merge_bytes(h_q: int, num_queries: int, num_splits: int) -> int:
    """Global memory in which clusters merge, see cluster_merge.cuh, with tiles of any of HEADS."""
    merged = num_queries * num_splits * max(-(-h_q // n) * n for n in HEADS) if cluster_of(num_splits) > 1 else 0
    return merged * PART_BYTES


def merge_rounds(heads: int, cluster: int) -> int:
    """Loads of other blocks' memory that a thread waits for, one after the other, when a cluster merges its results."""
    units = -(-heads * D_V // 4 // cluster)
    return 0 if cluster == 1 else -(-units // 256) * -(-cluster // 4)


@lru_cache(maxsize=4096)
def best_shape(h_q: int, queries: int, tiles: int, at_once: tuple[int, ...], splits: int | None) -> tuple[int, int]:
    """The heads a block and the splits with the least estimated time.

    Args:
        tiles: tiles of the longest query.
        at_once: clusters of 1, 2, ... MAX_CLUSTER blocks that the GPU runs at a time.
        splits: parts that each query's tiles are split into; None: up to a cluster's blocks, to be chosen.
    """

    def time(shape: tuple[int, int]) -> float:
        heads, splits = shape
        cluster = cluster_of(splits)
        pairs = math.ceil(math.ceil(tiles / splits) / 2)
        waves = math.ceil(queries * math.ceil(h_q / heads) * (splits // cluster) / at_once[cluster - 1])
        return waves * (BLOCK_TIME + PAIR_TIME[heads] * pairs) + ROUND_TIME * merge_rounds(heads, cluster)

    choice = range(1, max(1, min(tiles, MAX_CLUSTER)) + 1) if splits is None else (splits,)
    return min(((heads, n) for heads in HEADS for n in choice), key=time)


def shape_of(place: Place, h_q: int, num_queries: int, rows: int, num_splits: int | None) -> tuple[int, int]:
    """`best_shape` for a call whose queries have up to `rows` rows."""
    at_once = kernel(V32_FP8, max(HEADS), True).clusters_at_once(place.device)  # a block takes a whole multiprocessor
    return best_shape(h_q, num_queries, -(-rows // TILE_ROWS), at_once, num_splits)


def plan_splits(place: Place, h_q: int, num_queries: int, rows: int) -> int:
    """Splits of a call whose queries have up to `rows` rows."""
    return shape_of(place, h_q, num_queries, rows, None)[1]


def launch(
    place: Place,
    layout: Layout,
    h_q: int,
    num_queries: int,
    rows: int,
    num_splits: int,
    uneven: bool,
    params: Packed,
    batch_invariant: bool,
) -> None:
    """Launch for a call whose packed Params say `num_splits // cluster_of(num_splits)`.

    Args:
        rows: of the longest query.
        uneven: queries have lengths of their own, so that blocks should not take several in a fixed order.
        batch_invariant: the kernel must not depend on `num_queries`.
    """
    heads, _ = shape_of(place, h_q, 1 if batch_invariant else num_queries, rows, num_splits)
    head_tiles, cluster = -(-h_q // heads), cluster_of(num_splits)
    if cluster > 1:
        kernel(layout, heads, True).launch(place, (num_queries * cluster, head_tiles, 1), params, cluster)
    else:
        work = num_queries * head_tiles * num_splits
        blocks = work if uneven else min(work, num_sms(place.device))
        kernel(layout, heads, False).launch(place, (blocks, 1, 1), params)
