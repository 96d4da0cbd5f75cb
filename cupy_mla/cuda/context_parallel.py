"""Launchers of context parallelism: lengths and positions of a rank, and merges of the ranks' results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arrays import Array
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import ceil_div, ownership, pointer
from .program import Launch, Program
from .structs import INT32, INT64, POINTER, Struct

LOCAL_LENS = Struct("LocalLensParams", owner=structs.OWNERSHIP, lens=POINTER, out=POINTER, requests=INT32)
LOCALIZE = Struct(
    "LocalizeParams", owner=structs.OWNERSHIP, positions=POINTER, out=POINTER, length=POINTER, positions_stride=INT64,
    out_stride=INT64, width=INT32, aligned=INT32,
)  # fmt: skip
GLOBALIZE = Struct(
    "GlobalizeParams", owner=structs.OWNERSHIP, logits=POINTER, positions=POINTER, values=POINTER, out=POINTER,
    logits_stride=INT64, positions_stride=INT64, values_stride=INT64, out_stride=INT64, keys=INT32, width=INT32,
)  # fmt: skip
MERGE_TOPK = Struct(
    "MergeTopkParams", values=POINTER, positions=POINTER, out=POINTER, values_rank=INT64, values_token=INT64,
    positions_rank=INT64, positions_token=INT64, out_stride=INT64, ranks=INT32, width=INT32, k=INT32,
)  # fmt: skip
MERGE_RANKS = Struct(
    "MergeRanksParams", outs=POINTER, lses=POINTER, sink=POINTER, out=POINTER, lse=POINTER, outs_rank=INT64,
    outs_token=INT64, outs_head=INT64, lses_rank=INT64, lses_token=INT64, lses_head=INT64, out_token=INT64,
    out_head=INT64, lse_token=INT64, lse_head=INT64, ranks=INT32, aligned=INT32,
)  # fmt: skip

LENS_PER_BLOCK = 128
ENTRIES_PER_BLOCK = 256

LOCAL_LENS_KERNEL = Kernel("indices/local_lens.cu", LOCAL_LENS, {"LENS_PER_BLOCK": LENS_PER_BLOCK})
LOCALIZE_KERNEL = Kernel("indices/localize.cu", LOCALIZE, {}, overlaps=True)
GLOBALIZE_KERNEL = Kernel("indices/globalize.cu", GLOBALIZE, {"ENTRIES_PER_BLOCK": ENTRIES_PER_BLOCK}, overlaps=True)
MERGE_TOPK_KERNEL = Kernel("indexer/merge_topk.cu", MERGE_TOPK, {}, overlaps=True)


@cache
def merge_ranks_kernel(bf16: bool) -> Kernel:
    """The kernel for partial results in bfloat16, else in float32."""
    return Kernel("attention/merge_ranks.cu", MERGE_RANKS, {"BF16": int(bf16)}, overlaps=True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield from (LOCAL_LENS_KERNEL, LOCALIZE_KERNEL, GLOBALIZE_KERNEL, MERGE_TOPK_KERNEL)
    for bf16 in (False, True):
        yield merge_ranks_kernel(bf16)


def local_seq_lens(gpu: Gpu, lens: Array, world_size: int, rank: int, interleave: int, out: Array) -> Program:
    """Twin of `reference.context_parallel.local_seq_lens`."""
    requests = lens.shape[0]
    if requests == 0:
        return ()
    params = LOCAL_LENS(owner=ownership(world_size, rank, interleave), lens=lens.ptr, out=out.ptr, requests=requests)
    return [Launch(LOCAL_LENS_KERNEL, (ceil_div(requests, LENS_PER_BLOCK), 1, 1), params)]


def localize_topk(
    gpu: Gpu, positions: Array, world_size: int, rank: int, interleave: int, out: Array, length: Array
) -> Program:
    """Twin of `reference.context_parallel.localize_topk`."""
    tokens, width = positions.shape
    if tokens == 0:
        return ()
    params = LOCALIZE(
        owner=ownership(world_size, rank, interleave), positions=positions.ptr, out=out.ptr, length=length.ptr,
        positions_stride=positions.strides[0], out_stride=out.strides[0], width=width,
        aligned=int(positions.aligned(16)),
    )  # fmt: skip
    return [Launch(LOCALIZE_KERNEL, (tokens, 1, 1), params)]


def globalize_topk(
    gpu: Gpu,
    logits: Array,
    positions: Array,
    world_size: int,
    rank: int,
    interleave: int,
    values: Array,
    out: Array,
) -> Program:
    """Twin of `reference.context_parallel.globalize_topk`."""
    tokens, width = positions.shape
    if tokens == 0 or width == 0:
        return ()
    params = GLOBALIZE(
        owner=ownership(world_size, rank, interleave), logits=logits.ptr, positions=positions.ptr, values=values.ptr,
        out=out.ptr, logits_stride=logits.strides[0], positions_stride=positions.strides[0],
        values_stride=values.strides[0], out_stride=out.strides[0], keys=logits.shape[1], width=width,
    )  # fmt: skip
    return [Launch(GLOBALIZE_KERNEL, (tokens, ceil_div(width, ENTRIES_PER_BLOCK), 1), params)]


def merge_topk(gpu: Gpu, values: Array, positions: Array, k: int, out: Array) -> Program:
    """Twin of `reference.context_parallel.merge_topk`."""
    ranks, tokens, width = values.shape
    if tokens == 0:
        return ()
    params = MERGE_TOPK(
        values=values.ptr, positions=positions.ptr, out=out.ptr, values_rank=values.strides[0],
        values_token=values.strides[1], positions_rank=positions.strides[0], positions_token=positions.strides[1],
        out_stride=out.strides[0], ranks=ranks, width=width, k=k,
    )  # fmt: skip
    return [Launch(MERGE_TOPK_KERNEL, (tokens, 1, 1), params)]


def merge_attention(gpu: Gpu, outs: Array, lses: Array, sink: Array | None, out: Array, lse: Array) -> Program:
    """Twin of `reference.context_parallel.merge_attention`."""
    ranks, tokens, heads, _ = outs.shape
    if tokens == 0 or heads == 0:
        return ()
    params = MERGE_RANKS(
        outs=outs.ptr, lses=lses.ptr, sink=pointer(sink), out=out.ptr, lse=lse.ptr, outs_rank=outs.strides[0],
        outs_token=outs.strides[1], outs_head=outs.strides[2], lses_rank=lses.strides[0], lses_token=lses.strides[1],
        lses_head=lses.strides[2], out_token=out.strides[0], out_head=out.strides[1], lse_token=lse.strides[0],
        lse_head=lse.strides[1], ranks=ranks,
        aligned=int(outs.aligned(4 * outs.dtype.itemsize) and out.aligned(8)),
    )  # fmt: skip
    return [Launch(merge_ranks_kernel(outs.dtype.itemsize == 2), (tokens, heads, 1), params)]
