"""The Hopper kernel for FP8 rows: `kernels_cu/attention/sparse_decode_sm90.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arrays import Place
from ..layouts import ATTENTION_LAYOUTS, Layout
from ..recording import Packed
from .jit import Kernel, num_sms

HEADS = (32, 64)  # heads a block is built for
MAX_CLUSTER = 16
TILE_ROWS, UNIT_ROWS = 64, 16
SHARED_LIMIT = 232448  # bytes of shared memory a block may have

# A few words of addresses go to local memory, once a piece of work or once a tile.
SPILL_BYTES = 192


def block_heads(h_q: int) -> int:
    """Heads that one block works on, for a call with `h_q` heads."""
    return next((heads for heads in HEADS if h_q <= heads), max(HEADS))


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
    return (SHARED_LIMIT - 16 - fixed_bytes(layout, heads)) // unit_bytes(layout)


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
    )


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in ATTENTION_LAYOUTS:
        if layout.quantized:
            for heads in HEADS:
                for merges in (False, True):
                    yield kernel(layout, heads, merges)


def launch(place: Place, layout: Layout, h_q: int, num_queries: int, num_splits: int, uneven: bool, params: Packed) -> None:
    """Launch for a call with packed Params.

    Args:
        uneven: queries have lengths of their own, so that blocks should not take several in a fixed order.
    """
    heads = block_heads(h_q)
    work = num_queries * -(-h_q // heads) * num_splits
    blocks = work if uneven else min(work, num_sms(place.device))
    kernel(layout, heads).launch(place, (blocks, 1, 1), params)
