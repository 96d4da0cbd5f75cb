"""The Hopper kernels for few heads.

`kernels_cu/attention/few_heads_sm90.cu` serves V32_FP8 and bf16 rows; V4_FP8 is faster on the kernel for
more heads. Of bf16 rows, large batches and prefill are faster on `bf16_few_heads_sm90.cu`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, lru_cache

from ..arrays import Place
from ..layouts import BF16_512, BF16_576, D_V, V32_FP8, Layout
from ..recording import Packed
from .jit import MAX_CLUSTER, SM90_SHARED_BYTES, Kernel, num_sms
from .lists import longest_first
from .schedule import Shape, cheapest

HEADS = (8, 16, 32)  # heads a block is built for
TILE_ROWS = 64
RING_ROWS = 4 * 8  # rows of a unit of each of four copying warps
PREFILL_SPLITS = 2  # splits of a query up to which the prefill kernel is the faster one for bf16 rows

# A few words of addresses go to local memory, once a piece of work.
SPILL_BYTES = 64

# Microseconds on an H200, fitted to 2048 rows, batch 1 to 64: what a block takes besides its rows (Q, first rows,
# results), and what is added in proportion as blocks fill the GPU; a tile, and a round of a tile for each of a block's
# warpgroups; a cluster's merge; combine.cu's launch, and 1000 heads' parts in it.
BLOCK_TIME, FULL_TIME, TILE_TIME, ROUND_TIME = 2.9, 4.8, 1.2, 0.75
MERGE_TIME = {8: 3.3, 16: 3.3, 32: 5.0}  # by the heads a block
COMBINE_TIME, PART_TIME = 4.2, 1.0


def block_heads(h_q: int) -> int:
    """Heads that one block works on, for a call with `h_q` heads."""
    return next((heads for heads in HEADS if h_q <= heads), max(HEADS))


def groups(heads: int) -> int:
    """Warpgroups of a block that multiply."""
    return 2 if heads == 32 else 3


def fixed_bytes(layout: Layout, heads: int) -> int:
    """Shared memory of a block without its rings: Q, P, statistics."""
    n = groups(heads)
    copies = layout.num_scales if layout.scale_kind == "fp32" else 1
    q, p = heads * layout.d_qk * 2, n * copies * heads * 128
    values = 1 + 2 * n * (1 + copies) + n * copies + 4 * n * (1 + copies) + 4 * n + 1  # struct Small, a head
    return q + p + 4 * values * heads


def unit_bytes(layout: Layout) -> int:
    """Shared memory of a unit of each ring, and of their barriers."""
    staged = layout.row_stride + (0 if layout.quantized else 16)
    return RING_ROWS * staged + 4 * 16


def units(layout: Layout, heads: int) -> int:
    """Units of eight rows that a copying warp has space for."""
    return (SM90_SHARED_BYTES - fixed_bytes(layout, heads)) // unit_bytes(layout)


@cache
def kernel(layout: Layout, heads: int) -> Kernel:
    """The kernel for one cache layout and heads a block."""
    shared = fixed_bytes(layout, heads) + units(layout, heads) * unit_bytes(layout)
    defines = {"D_V": D_V, "HEADS": heads, "TILE_ROWS": TILE_ROWS, "CONSUMERS": groups(heads), "MAX_CLUSTER": MAX_CLUSTER}
    return Kernel(
        "attention/few_heads_sm90.cu",
        "few_heads_sm90",
        {**layout.defines(), **defines},
        threads=128 * (groups(heads) + 1),
        shared_bytes=shared,
        archs=("90a",),
        target="90a",
        spill_bytes=SPILL_BYTES,
        max_cluster=MAX_CLUSTER,
        overlaps=True,
    )


@lru_cache(maxsize=4096)
def best_shape(h_q: int, queries: int, tiles: int, at_once: tuple[int, ...], splits: int | None) -> Shape:
    """`schedule.cheapest` by this kernel's times."""

    def block_time(shape: Shape, full: float) -> float:
        each = math.ceil(tiles / shape.splits)
        work = BLOCK_TIME + FULL_TIME * full
        work += TILE_TIME * each + ROUND_TIME * math.ceil(each / groups(shape.heads))
        return work + (MERGE_TIME[shape.heads] if shape.cluster > 1 else 0.0)

    def combine_time(_: Shape, parts: float) -> float:
        return COMBINE_TIME + PART_TIME * parts

    return cheapest((block_heads(h_q),), tiles, splits, h_q, queries, at_once, block_time, combine_time)


def shape_of(place: Place, h_q: int, num_queries: int, rows: int, num_splits: int | None) -> Shape:
    """`best_shape` for a call whose queries have up to `rows` rows."""
    at_once = kernel(V32_FP8, block_heads(h_q)).clusters_at_once(place.device)  # a block takes a whole multiprocessor
    return best_shape(h_q, num_queries, -(-rows // TILE_ROWS), at_once, num_splits)


def prefill_shared_bytes(layout: Layout, heads: int, queries: int) -> int:
    """Shared memory a block of the prefill kernel: Q, two tiles with what P takes beyond the RoPE part, statistics."""
    tile = TILE_ROWS * 2 * D_V + max(heads * 128, TILE_ROWS * 2 * (layout.d_qk - D_V))
    return queries * heads * layout.d_qk * 2 + 2 * tile + 16 * 8 + (2 * 2 * 4 + 2 * 3) * heads * 4 + 8


@cache
def prefill_kernel(layout: Layout, heads: int, queries: int) -> Kernel:
    """The prefill kernel for bf16 rows of one width, heads a block and queries a block (1 or 2)."""
    shared = prefill_shared_bytes(layout, heads, queries)
    return Kernel(
        "attention/bf16_few_heads_sm90.cu",
        "bf16_few_heads_sm90",
        {**layout.defines(), "D_V": D_V, "HEADS": heads, "TILE_ROWS": TILE_ROWS, "QUERIES": queries, "MAX_CLUSTER": MAX_CLUSTER},
        threads=512,
        shared_bytes=shared,
        archs=("90a",),
        target="90a",
        max_cluster=MAX_CLUSTER,
    )


def queries_per_block(layout: Layout, heads: int) -> tuple[int, ...]:
    """Of 1 and 2 what fits the shared memory of a block of the prefill kernel."""
    return tuple(queries for queries in (1, 2) if prefill_shared_bytes(layout, heads, queries) <= SM90_SHARED_BYTES)


def launch(
    place: Place,
    layout: Layout,
    shape: Shape,
    h_q: int,
    num_queries: int,
    uneven: bool,
    params: Packed,
    batch_invariant: bool = False,
) -> None:
    """Launch for a call whose packed Params say `shape.parts`.

    Args:
        uneven: queries have lengths of their own.
        batch_invariant: the kernel must not depend on `num_queries`.
    """
    heads, splits, cluster = shape
    head_tiles = -(-h_q // heads)
    items, sms = num_queries * head_tiles, num_sms(place.device)
    if layout.quantized or splits > PREFILL_SPLITS or batch_invariant:
        kernel(layout, heads).launch(place, (num_queries * cluster, shape.parts, head_tiles), params, cluster)
    elif splits == 1 and items > sms and 2 in queries_per_block(layout, heads):
        if uneven:
            params, _order = longest_first(place, num_queries, params)
        prefill_kernel(layout, heads, 2).launch(place, (min(-(-items // 2), sms), 1, 1), params)
    else:
        prefill_kernel(layout, heads, 1).launch(place, (items * cluster, shape.parts, 1), params, cluster)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in (BF16_576, BF16_512, V32_FP8):
        for heads in HEADS:
            yield kernel(layout, heads)
            if not layout.quantized:
                for queries in queries_per_block(layout, heads):
                    yield prefill_kernel(layout, heads, queries)
