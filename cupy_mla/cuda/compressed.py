"""Launchers of the index kernels for compressed rows: `compressed_slots.cu` and `c128a.cu` of `kernels_cu/indices`."""

from __future__ import annotations

from collections.abc import Iterator

from ..arguments import C128aLists, CompressedSlots
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import block_table, ceil_div, ownership, pointer, queries
from .program import Launch, Program
from .structs import INT32, INT64, POINTER, Struct

COMPRESSED_SLOTS = Struct(
    "CompressedSlotsParams", table=structs.BLOCK_TABLE, queries=structs.QUERIES, owner=structs.OWNERSHIP,
    slot_mapping=POINTER, out=POINTER, size=INT32, ratio=INT32,
)  # fmt: skip
C128A = Struct(
    "C128aParams", table=structs.BLOCK_TABLE, positions=POINTER, slot_mapping=POINTER, token_to_req=POINTER,
    decode_indices=POINTER, decode_lens=POINTER, prefill_indices=POINTER, decode_stride=INT64, prefill_stride=INT64,
    decode_width=INT32, prefill_width=INT32, num_decode_tokens=INT32, ratio=INT32, most=INT32,
)  # fmt: skip

SLOTS_TOKENS_PER_BLOCK = 256

# Finds the slots of the rows that tokens complete.
SLOTS_KERNEL = Kernel("indices/compressed_slots.cu", COMPRESSED_SLOTS, {"TOKENS_PER_BLOCK": SLOTS_TOKENS_PER_BLOCK})
# Lists all complete rows of each token, with a CTA for each token.
C128A_KERNEL = Kernel("indices/c128a.cu", C128A, {})


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield from (SLOTS_KERNEL, C128A_KERNEL)


def get_compressed_slot_mapping(gpu: Gpu, a: CompressedSlots) -> Program:
    """Twin of `reference.compressed.get_compressed_slot_mapping`."""
    (size,) = a.out.shape
    if size == 0:
        return ()
    params = COMPRESSED_SLOTS(
        table=block_table(a.block_table, a.block_size), queries=queries(a.query_start_loc, a.seq_lens, a.num_tokens),
        owner=ownership(a.world_size, a.rank, a.interleave), slot_mapping=pointer(a.slot_mapping), out=a.out.ptr,
        size=size, ratio=a.compress_ratio,
    )  # fmt: skip
    return [Launch(SLOTS_KERNEL, (ceil_div(size, SLOTS_TOKENS_PER_BLOCK), 1, 1), params)]


def build_c128a_topk_metadata(gpu: Gpu, a: C128aLists) -> Program:
    """Twin of `reference.compressed.build_c128a_topk_metadata`."""
    (tokens,) = a.positions.shape
    if tokens == 0:
        return ()
    decode, prefill = a.decode_indices, a.prefill_indices
    params = C128A(
        table=block_table(a.block_table, a.block_size), positions=a.positions.ptr, slot_mapping=a.slot_mapping.ptr,
        token_to_req=a.token_to_req.ptr, decode_indices=decode.ptr, decode_lens=a.decode_lens.ptr,
        prefill_indices=prefill.ptr, decode_stride=decode.strides[0], prefill_stride=prefill.strides[0],
        decode_width=decode.shape[1], prefill_width=prefill.shape[1], num_decode_tokens=a.num_decode_tokens,
        ratio=a.compress_ratio, most=a.max_compressed_tokens,
    )  # fmt: skip
    return [Launch(C128A_KERNEL, (tokens, 1, 1), params)]
