"""Launchers of the kernels for the indexer's key cache: `pack_keys.cu` and `gather_keys.cu` of `kernels_cu/indexer`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import frexp

from ..arrays import Array
from ..layouts import INDEXER_LAYOUTS, INDEXER_MXFP4, Layout
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import block_table, ceil_div
from .program import Launch, Program
from .structs import INT32, INT64, POINTER, Struct

PACK_KEYS = Struct(
    "PackKeysParams", k=POINTER, cache=POINTER, slots=POINTER, k_stride=INT64, block_stride=INT64, num_slots=INT64,
    block_size=INT32, num_tokens=INT32, power_of_two=INT32, least_scale=INT32,
)  # fmt: skip
GATHER_KEYS = Struct(
    "GatherKeysParams", table=structs.BLOCK_TABLE, cache=POINTER, keys=POINTER, scales=POINTER, cu_seq_lens=POINTER,
    block_stride=INT64, keys_stride=INT64, rows=INT64, num_blocks=INT32,
)  # fmt: skip

PACK_TOKENS_PER_BLOCK = 64
GATHER_TOKENS_PER_BLOCK = 128
GATHER_CTAS_PER_SM = 32  # at most. 4 run at a time: to start new ones uses memory better than a loop in each


def defines_of(layout: Layout) -> dict[str, int | str]:
    """The constants for a layout of keys."""
    return {**layout.defines(), "MXFP4": int(layout is INDEXER_MXFP4)}


@cache
def pack_kernel(layout: Layout, aligned: bool) -> Kernel:
    """The kernel that quantizes keys into a cache; `aligned`: arrays allow wide accesses."""
    defines = {**defines_of(layout), "ALIGNED": int(aligned), "TOKENS_PER_BLOCK": PACK_TOKENS_PER_BLOCK}
    return Kernel("indexer/pack_keys.cu", PACK_KEYS, defines)


@cache
def gather_kernel(layout: Layout, widen: bool, aligned: bool) -> Kernel:
    """The kernel that copies keys and scales out of a cache.

    Args:
        widen: MXFP4 is written as e5m2.
        aligned: arrays allow wide accesses.
    """
    defines = {**defines_of(layout), "ALIGNED": int(aligned), "TOKENS_PER_BLOCK": GATHER_TOKENS_PER_BLOCK}
    defines["WIDEN"] = int(widen)
    return Kernel("indexer/gather_keys.cu", GATHER_KEYS, defines)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for aligned in (True, False):
        for layout in INDEXER_LAYOUTS:
            yield pack_kernel(layout, aligned)
            yield gather_kernel(layout, False, aligned)
        yield gather_kernel(INDEXER_MXFP4, True, aligned)


def indexer_k_quant_and_cache(
    gpu: Gpu, layout: Layout, k: Array, kv_cache: Array, slots: Array, scale_format: str, least_scale: float
) -> Program:
    """Twin of `reference.indexer.indexer_k_quant_and_cache`."""
    (tokens,) = slots.shape
    num_blocks, block_size, _ = kv_cache.shape
    if tokens == 0 or num_blocks == 0:
        return ()
    params = PACK_KEYS(
        k=k.ptr, cache=kv_cache.ptr, slots=slots.ptr, k_stride=k.strides[0], block_stride=kv_cache.strides[0],
        num_slots=num_blocks * block_size, block_size=block_size, num_tokens=tokens,
        power_of_two=int(scale_format == "ue8m0"), least_scale=frexp(least_scale)[1] + 126,
    )  # fmt: skip
    aligned = k.aligned(16) and blocks_aligned(kv_cache, 8)
    return [Launch(pack_kernel(layout, aligned), (ceil_div(tokens, PACK_TOKENS_PER_BLOCK), 1, 1), params)]


def cp_gather_indexer_k_quant_cache(
    gpu: Gpu, layout: Layout, kv_cache: Array, dst_k: Array, dst_scale: Array, table: Array, cu_seq_lens: Array
) -> Program:
    """Twin of `reference.indexer.cp_gather_indexer_k_quant_cache`."""
    num_blocks, block_size, _ = kv_cache.shape
    rows = dst_k.shape[0]
    if rows == 0 or table.shape[0] == 0:
        return ()
    params = GATHER_KEYS(
        table=block_table(table, block_size), cache=kv_cache.ptr, keys=dst_k.ptr, scales=dst_scale.ptr,
        cu_seq_lens=cu_seq_lens.ptr, block_stride=kv_cache.strides[0], keys_stride=dst_k.strides[0], rows=rows,
        num_blocks=num_blocks,
    )  # fmt: skip
    ctas = min(ceil_div(rows, GATHER_TOKENS_PER_BLOCK), GATHER_CTAS_PER_SM * gpu.sms)
    aligned = blocks_aligned(kv_cache, 16) and dst_k.aligned(16)
    widen = dst_k.shape[1] != layout.row_stride
    return [Launch(gather_kernel(layout, widen, aligned), (ctas, 1, 1), params)]


def blocks_aligned(kv_cache: Array, nbytes: int) -> bool:
    """True when every block starts at a multiple of `nbytes`. Then its keys do, too."""
    return kv_cache.ptr % nbytes == 0 and (kv_cache.shape[0] <= 1 or kv_cache.strides[0] % nbytes == 0)
