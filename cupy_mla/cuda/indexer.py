"""Launches the kernels of the indexer's key cache: `kernels_cu/indexer/pack.cu` and `gather.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arrays import Array, Place
from ..layouts import INDEXER_FP8
from ..recording import Params
from .jit import Kernel, num_sms
from .paging import BLOCK_TABLE, block_table_fields

THREADS = 256
PACK_TOKENS_PER_BLOCK = 64
GATHER_TOKENS_PER_BLOCK = THREADS // 32 * 16
GATHER_BLOCKS_PER_SM = 4  # that run at a time

_PACK = Params("=3Q3q3i4x")  # struct Params of pack.cu
_GATHER = Params("=" + BLOCK_TABLE + "4Q3qi4x")  # struct Params of gather.cu


@cache
def pack_kernel(aligned: bool) -> Kernel:
    """The kernel that quantizes keys into the cache, for arrays that allow wide accesses or do not."""
    defines = {**INDEXER_FP8.defines(), "ALIGNED": int(aligned), "TOKENS_PER_BLOCK": PACK_TOKENS_PER_BLOCK}
    return Kernel("indexer/pack_keys.cu", "pack_keys", defines, threads=THREADS)


@cache
def gather_kernel(aligned: bool) -> Kernel:
    """The kernel that copies keys and scales out of the cache, for arrays that allow wide accesses or do not."""
    defines = {**INDEXER_FP8.defines(), "ALIGNED": int(aligned), "TOKENS_PER_BLOCK": GATHER_TOKENS_PER_BLOCK}
    return Kernel("indexer/gather_keys.cu", "gather_keys", defines, threads=THREADS)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for aligned in (True, False):
        yield pack_kernel(aligned)
        yield gather_kernel(aligned)


def indexer_k_quant_and_cache(place: Place, k: Array, kv_cache: Array, slots: Array, scale_format: str) -> None:
    """Twin of `reference.indexer.indexer_k_quant_and_cache`."""
    tokens = slots.shape[0]
    num_blocks, block_size, _ = kv_cache.shape
    if tokens == 0 or num_blocks == 0:
        return
    params = _PACK.pack(
        k.ptr, kv_cache.ptr, slots.ptr, k.strides[0], kv_cache.strides[0], num_blocks * block_size,
        block_size, tokens, scale_format == "ue8m0",
    )  # fmt: skip
    aligned = k.aligned(16) and _block_aligned(kv_cache, 8)
    pack_kernel(aligned).launch(place, (-(-tokens // PACK_TOKENS_PER_BLOCK), 1, 1), params)


def cp_gather_indexer_k_quant_cache(
    place: Place, kv_cache: Array, dst_k: Array, dst_scale: Array, block_table: Array, cu_seq_lens: Array
) -> None:
    """Twin of `reference.indexer.cp_gather_indexer_k_quant_cache`."""
    num_blocks, block_size, _ = kv_cache.shape
    rows = dst_k.shape[0]
    if rows == 0 or block_table.shape[0] == 0:
        return
    params = _GATHER.pack(
        *block_table_fields(block_table, block_size),
        kv_cache.ptr, dst_k.ptr, dst_scale.ptr, cu_seq_lens.ptr,
        kv_cache.strides[0], dst_k.strides[0], rows, num_blocks,
    )  # fmt: skip
    blocks = min(-(-rows // GATHER_TOKENS_PER_BLOCK), GATHER_BLOCKS_PER_SM * num_sms(place.device))
    aligned = _block_aligned(kv_cache, 16) and dst_k.aligned(16)
    gather_kernel(aligned).launch(place, (blocks, 1, 1), params)


def _block_aligned(kv_cache: Array, nbytes: int) -> bool:
    """True when every block starts at a multiple of `nbytes`; its keys then do, too."""
    return kv_cache.ptr % nbytes == 0 and (kv_cache.shape[0] <= 1 or kv_cache.strides[0] % nbytes == 0)
