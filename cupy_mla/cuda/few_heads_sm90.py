"""The Hopper kernels for few heads: `kernels_cu/attention/sparse_decode_sm90_few_heads.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache

from ..arrays import Place
from ..layouts import ATTENTION_LAYOUTS, D_V, Layout
from ..recording import Packed
from .jit import Kernel, num_sms

HEADS = (8, 16, 32)  # heads a block is built for
TILE_ROWS = 64
MAX_CLUSTER = 16
LEAST_UNITS = 2
SHARED_LIMIT = 232448  # bytes of shared memory a block may have

# A few words of addresses go to local memory, once a piece of work or once a tile.
SPILL_BYTES = 64


def block_heads(h_q: int) -> int:
    """Heads that one block works on, for a call with `h_q` heads."""
    return next((heads for heads in HEADS if h_q <= heads), max(HEADS))


def fixed_bytes(layout: Layout, heads: int, queries: int) -> int:
    """Shared memory a block without staged rows: Q, two tiles with what P takes beyond the RoPE part, statistics."""
    copies = 1 if layout.scale_kind != "fp32" else layout.num_scales // 2 if heads == 32 else layout.num_scales
    tile = TILE_ROWS * 2 * D_V + max(heads * 128 * copies, TILE_ROWS * 2 * (layout.d_qk - D_V))
    return queries * heads * layout.d_qk * 2 + 2 * tile + (2 * 2 * 4 + 2 * 3) * heads * 4


def unit_bytes(layout: Layout) -> int:
    """Shared memory of four staged rows for each of eight warps, and of their barriers."""
    return 8 * (4 * (layout.row_stride + (16 if layout.scales_apart else 0)) + 8)


def units(layout: Layout, heads: int, queries: int) -> int:
    """Units of four FP8 rows that a warp has space for, at most a tile's 16 rows."""
    return min((SHARED_LIMIT - 64 - fixed_bytes(layout, heads, queries)) // unit_bytes(layout), 4)


def shared_bytes(layout: Layout, heads: int, queries: int) -> int:
    """Shared memory a block."""
    fixed = fixed_bytes(layout, heads, queries) + 64
    return fixed + (units(layout, heads, queries) * unit_bytes(layout) if layout.quantized else 64)


FP8_RING_ROWS = 8 * 4  # rows of a unit of each of four copying warps


def groups(heads: int) -> int:
    """Warpgroups of a block that multiply."""
    return 2 if heads == 32 else 3


def fp8_fixed_bytes(layout: Layout, heads: int) -> int:
    """Shared memory of an FP8 block without its rings: Q, P, statistics."""
    copies = layout.num_scales if layout.scale_kind == "fp32" else 1
    n = groups(heads)
    q, p = heads * layout.d_qk * 2, n * copies * heads * 128
    values = 1 + 2 * n * (1 + copies) + n * copies + 4 * n * (1 + copies) + 4 * n + 1 + 3  # struct Small, a head
    return q + p + 4 * values * heads


def fp8_unit_bytes(layout: Layout) -> int:
    """Shared memory of a unit of each ring, and of their barriers."""
    staged = layout.row_stride + (16 if layout.scales_apart or not layout.quantized else 0)
    return FP8_RING_ROWS * staged + 4 * 16


def fp8_units(layout: Layout, heads: int) -> int:
    """Units of eight rows that a copying warp has space for."""
    return (SHARED_LIMIT - fp8_fixed_bytes(layout, heads)) // fp8_unit_bytes(layout)


@cache
def fp8_kernel(layout: Layout, heads: int) -> Kernel:
    """The kernel for an FP8 cache and heads a block."""
    units = fp8_units(layout, heads)
    shared = fp8_fixed_bytes(layout, heads) + units * fp8_unit_bytes(layout)
    return Kernel(
        "attention/sparse_decode_sm90_fp8_few_heads.cu",
        "sparse_decode_fp8_few_heads",
        {**layout.defines(), "HEADS": heads, "UNITS": units, "EXPECTED_SHARED_BYTES": shared},
        threads=128 * (groups(heads) + 1),
        shared_bytes=shared,
        archs=("90a",),
        target="90a",
        max_cluster=MAX_CLUSTER,
    )


@cache
def kernel(layout: Layout, heads: int, queries: int) -> Kernel:
    """The kernel for one cache layout, heads a block and queries a block (1 or 2)."""
    shared = shared_bytes(layout, heads, queries)
    staged = units(layout, heads, queries) if layout.quantized else 1
    defines = {"HEADS": heads, "QUERIES": queries, "UNITS": staged, "EXPECTED_SHARED_BYTES": shared}
    return Kernel(
        "attention/sparse_decode_sm90_few_heads.cu",
        "sparse_attention_few_heads",
        {**layout.defines(), **defines},
        threads=256 if layout.quantized else 512,
        shared_bytes=shared,
        archs=("90a",),
        target="90a",
        spill_bytes=SPILL_BYTES,
        max_cluster=MAX_CLUSTER,
    )


def queries_per_block(layout: Layout, heads: int) -> tuple[int, ...]:
    """Of 1 and 2 what fits a block's shared memory."""
    if layout.quantized:
        return tuple(queries for queries in (1, 2) if units(layout, heads, queries) >= LEAST_UNITS)
    return tuple(queries for queries in (1, 2) if shared_bytes(layout, heads, queries) <= SHARED_LIMIT)


@lru_cache(maxsize=4096)
def best_splits(items: int, tiles: int, sms: int) -> int:
    """Parts that each query's tiles are split into: a power of two, so that clusters can merge them.

    Args:
        items: queries times head tiles.
        tiles: tiles of the longest query.
        sms: streaming multiprocessors.

    Returns:
        1 when the items fill the GPU; a part keeps at least a tile for each of a block's two warpgroups.
    """
    splits = 1
    while 2 * splits * items <= sms and 4 * splits <= max(tiles, 1):
        splits *= 2
    return splits


def launch(
    place: Place, layout: Layout, h_q: int, num_queries: int, num_splits: int, uneven: bool, params: Packed
) -> None:
    """Launch for a call whose packed Params say `num_splits // cluster`, see `cluster_of`.

    Args:
        uneven: queries have lengths of their own, so that blocks should not take several in a fixed order.
    """
    heads = block_heads(h_q)
    items = num_queries * -(-h_q // heads)
    sms = num_sms(place.device)
    if layout.quantized:
        cluster = cluster_of(num_splits)
        fp8_kernel(layout, heads).launch(place, (items * cluster, num_splits // cluster, 1), params, cluster)
    elif num_splits == 1 and items > sms and 2 in queries_per_block(layout, heads):
        pairs = -(-items // 2)
        blocks = pairs if uneven else min(pairs, sms)
        kernel(layout, heads, 2).launch(place, (blocks, 1, 1), params)
    else:
        cluster = cluster_of(num_splits)
        kernel(layout, heads, 1).launch(place, (items * cluster, num_splits // cluster, 1), params, cluster)


def cluster_of(num_splits: int) -> int:
    """Blocks of a cluster: the largest divisor of the splits, as far as clusters go."""
    return max(n for n in range(1, MAX_CLUSTER + 1) if num_splits % n == 0)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in ATTENTION_LAYOUTS:
        for heads in HEADS:
            if layout.quantized:
                yield fp8_kernel(layout, heads)
                continue
            for queries in queries_per_block(layout, heads):
                yield kernel(layout, heads, queries)
