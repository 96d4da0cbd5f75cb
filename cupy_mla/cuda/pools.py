"""Launchers of the kernels for pooled keys: `pool_keys.cu`, `pool_tail.cu`, `expand_pools.cu` of
`kernels_cu/indices`."""

from __future__ import annotations

from collections.abc import Iterator

from ..arguments import PooledKeys
from ..arrays import Array
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import ceil_div, divisor, queries
from .program import Launch, Program
from .structs import INT32, INT64, POINTER, Struct

POOL_KEYS = Struct(
    "PoolKeysParams", queries=structs.QUERIES, pool=structs.DIVISOR, ring=INT32, k=POINTER, gate=POINTER, ape=POINTER,
    tail=POINTER, ring_ids=POINTER, out=POINTER, k_stride=INT64, gate_stride=INT64, ape_stride=INT64, tail_stride=INT64,
    out_stride=INT64, num_rings=INT32,
)  # fmt: skip
POOL_TAIL = Struct(
    "PoolTailParams", queries=structs.QUERIES, k=POINTER, gate=POINTER, tail=POINTER, ring_ids=POINTER, k_stride=INT64,
    gate_stride=INT64, tail_stride=INT64, ring=INT32, num_rings=INT32,
)  # fmt: skip
EXPAND_POOLS = Struct(
    "ExpandPoolsParams", pool=structs.DIVISOR, pools=INT32, chosen=POINTER, seq_lens=POINTER, out=POINTER, lens=POINTER,
    chosen_stride=INT64, out_stride=INT64,
)  # fmt: skip

TOKENS_PER_BLOCK = 8

# Makes the keys of complete pools.
KEYS_KERNEL = Kernel("indices/pool_keys.cu", POOL_KEYS, {"TOKENS_PER_BLOCK": TOKENS_PER_BLOCK})
# Keeps the tokens that later pools need.
TAIL_KERNEL = Kernel("indices/pool_tail.cu", POOL_TAIL, {"TOKENS_PER_BLOCK": TOKENS_PER_BLOCK})
# Lists the tokens of chosen pools, with a CTA for each query token.
EXPAND_KERNEL = Kernel("indices/expand_pools.cu", EXPAND_POOLS, {})


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield from (KEYS_KERNEL, TAIL_KERNEL, EXPAND_KERNEL)


def kpool_compress(gpu: Gpu, a: PooledKeys) -> Program:
    """Twin of `reference.pools.kpool_compress`."""
    tokens = a.k.shape[0]
    if tokens == 0:
        return ()
    num_rings, _, ring, _ = a.tail.shape
    of_queries = queries(a.query_start_loc, a.seq_lens, tokens)
    keys = POOL_KEYS(
        queries=of_queries, pool=divisor(a.ape.shape[0]), ring=ring, k=a.k.ptr, gate=a.gate.ptr, ape=a.ape.ptr,
        tail=a.tail.ptr, ring_ids=a.tail_blocks.ptr, out=a.out.ptr, k_stride=a.k.strides[0],
        gate_stride=a.gate.strides[0], ape_stride=a.ape.strides[0], tail_stride=a.tail.strides[0],
        out_stride=a.out.strides[0], num_rings=num_rings,
    )  # fmt: skip
    tail = POOL_TAIL(
        queries=of_queries, k=a.k.ptr, gate=a.gate.ptr, tail=a.tail.ptr, ring_ids=a.tail_blocks.ptr,
        k_stride=a.k.strides[0], gate_stride=a.gate.strides[0], tail_stride=a.tail.strides[0], ring=ring,
        num_rings=num_rings,
    )  # fmt: skip
    grid = (ceil_div(tokens, TOKENS_PER_BLOCK), 1, 1)
    return [Launch(KEYS_KERNEL, grid, keys), Launch(TAIL_KERNEL, grid, tail)]


def expand_pools_and_append_tail(
    gpu: Gpu, pool_ids: Array, seq_lens: Array, kpool: int, out: Array, lens: Array
) -> Program:
    """Twin of `reference.pools.expand_pools_and_append_tail`."""
    tokens, pools = pool_ids.shape
    if tokens == 0:
        return ()
    params = EXPAND_POOLS(
        pool=divisor(kpool), pools=pools, chosen=pool_ids.ptr, seq_lens=seq_lens.ptr, out=out.ptr, lens=lens.ptr,
        chosen_stride=pool_ids.strides[0], out_stride=out.strides[0],
    )  # fmt: skip
    return [Launch(EXPAND_KERNEL, (tokens, 1, 1), params)]
