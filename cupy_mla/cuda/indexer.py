"""Launches the kernels of the indexer's key cache: `pack_keys` and `gather_keys` of `kernels_cu/indexer`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arrays import Array
from ..layouts import INDEXER_FP8
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import block_table, ceil_div
from .program import Launch, Program

PACK_TOKENS_PER_BLOCK = 64
GATHER_TOKENS_PER_BLOCK = 128
GATHER_BLOCKS_PER_SM = 4  # that run at a time


@cache
def pack_kernel(aligned: bool) -> Kernel:
    """The kernel that quantizes keys into the cache, for arrays that allow wide accesses or do not."""
    defines = {**INDEXER_FP8.defines(), "ALIGNED": int(aligned), "TOKENS_PER_BLOCK": PACK_TOKENS_PER_BLOCK}
    return Kernel("indexer/pack_keys.cu", structs.PACK_KEYS, defines)


@cache
def gather_kernel(aligned: bool) -> Kernel:
    """The kernel that copies keys and scales out of the cache, for arrays that allow wide accesses or do not."""
    defines = {**INDEXER_FP8.defines(), "ALIGNED": int(aligned), "TOKENS_PER_BLOCK": GATHER_TOKENS_PER_BLOCK}
    return Kernel("indexer/gather_keys.cu", structs.GATHER_KEYS, defines)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for aligned in (True, False):
        yield pack_kernel(aligned)
        yield gather_kernel(aligned)


def indexer_k_quant_and_cache(gpu: Gpu, k: Array, kv_cache: Array, slots: Array, scale_format: str) -> Program:
    """Twin of `reference.indexer.indexer_k_quant_and_cache`."""
    (tokens,) = slots.shape
    num_blocks, block_size, _ = kv_cache.shape
    if tokens == 0 or num_blocks == 0:
        return ()
    params = structs.PACK_KEYS(
        k=k.ptr, cache=kv_cache.ptr, slots=slots.ptr, k_stride=k.strides[0], block_stride=kv_cache.strides[0],
        num_slots=num_blocks * block_size, block_size=block_size, num_tokens=tokens,
        power_of_two=int(scale_format == "ue8m0"),
    )  # fmt: skip
    aligned = k.aligned(16) and _block_aligned(kv_cache, 8)
    return [Launch(pack_kernel(aligned), (ceil_div(tokens, PACK_TOKENS_PER_BLOCK), 1, 1), params)]


def cp_gather_indexer_k_quant_cache(
    gpu: Gpu, kv_cache: Array, dst_k: Array, dst_scale: Array, table: Array, cu_seq_lens: Array
) -> Program:
    """Twin of `reference.indexer.cp_gather_indexer_k_quant_cache`."""
    num_blocks, block_size, _ = kv_cache.shape
    rows = dst_k.shape[0]
    if rows == 0 or table.shape[0] == 0:
        return ()
    params = structs.GATHER_KEYS(
        table=block_table(table, block_size), cache=kv_cache.ptr, keys=dst_k.ptr, scales=dst_scale.ptr,
        cu_seq_lens=cu_seq_lens.ptr, block_stride=kv_cache.strides[0], keys_stride=dst_k.strides[0], rows=rows,
        num_blocks=num_blocks,
    )  # fmt: skip
    blocks = min(ceil_div(rows, GATHER_TOKENS_PER_BLOCK), GATHER_BLOCKS_PER_SM * gpu.sms)
    aligned = _block_aligned(kv_cache, 16) and dst_k.aligned(16)
    return [Launch(gather_kernel(aligned), (blocks, 1, 1), params)]


def _block_aligned(kv_cache: Array, nbytes: int) -> bool:
    """True when every block starts at a multiple of `nbytes`; its keys then do, too."""
    return kv_cache.ptr % nbytes == 0 and (kv_cache.shape[0] <= 1 or kv_cache.strides[0] % nbytes == 0)
