"""Launches the index kernels of compressed rows: `compressed_slots.cu` and `c128a.cu` of `kernels_cu/indices`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arrays import Array, Place
from ..recording import Params
from .indices import convert_req_index_to_global_index
from .jit import Kernel
from .paging import BLOCK_TABLE, QUERIES, block_table_fields, query_fields

THREADS = 256

_SLOTS = Params("=" + BLOCK_TABLE + QUERIES + "Q2i")  # struct Params of compressed_slots.cu
_C128A = Params("=" + BLOCK_TABLE + "6Q2q5i4x")  # struct Params of c128a.cu


@cache
def slots_kernel() -> Kernel:
    """The kernel that maps tokens to the slots of the rows they own."""
    return Kernel("indices/compressed_slots.cu", "compressed_slots", {"TOKENS_PER_BLOCK": THREADS}, threads=THREADS)


@cache
def c128a_kernel() -> Kernel:
    """The kernel that lists every complete row of each token."""
    return Kernel("indices/c128a.cu", "c128a", {}, threads=THREADS)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield slots_kernel()
    yield c128a_kernel()


def compute_global_topk_indices_and_lens(
    place: Place,
    topk_indices: Array,
    token_to_req: Array,
    block_table: Array,
    block_size: int,
    is_valid_token: Array,
    out: Array,
    lens: Array,
) -> None:
    """Twin of `reference.compressed.compute_global_topk_indices_and_lens`."""
    convert_req_index_to_global_index(
        place, token_to_req, block_table, topk_indices, block_size, None, None, out, lens, is_valid_token
    )


def get_compressed_slot_mapping(
    place: Place,
    num_tokens: int,
    query_start_loc: Array,
    seq_lens: Array,
    block_table: Array,
    block_size: int,
    compress_ratio: int,
    out: Array,
) -> None:
    """Twin of `reference.compressed.get_compressed_slot_mapping`."""
    size = out.shape[0]
    if size == 0:
        return
    params = _SLOTS.pack(
        *block_table_fields(block_table, block_size), *query_fields(query_start_loc, seq_lens, num_tokens),
        out.ptr, size, compress_ratio,
    )  # fmt: skip
    slots_kernel().launch(place, (-(-size // THREADS), 1, 1), params)


def build_c128a_topk_metadata(
    place: Place,
    positions: Array,
    compress_ratio: int,
    num_decode_tokens: int,
    token_to_req: Array,
    block_table: Array,
    block_size: int,
    slot_mapping: Array,
    decode_indices: Array,
    decode_lens: Array,
    prefill_indices: Array,
    max_compressed_tokens: int,
) -> None:
    """Twin of `reference.compressed.build_c128a_topk_metadata`."""
    tokens = positions.shape[0]
    if tokens == 0:
        return
    params = _C128A.pack(
        *block_table_fields(block_table, block_size),
        positions.ptr, slot_mapping.ptr, token_to_req.ptr, decode_indices.ptr, decode_lens.ptr, prefill_indices.ptr,
        decode_indices.strides[0], prefill_indices.strides[0], decode_indices.shape[1], prefill_indices.shape[1],
        num_decode_tokens, compress_ratio, max_compressed_tokens,
    )  # fmt: skip
    c128a_kernel().launch(place, (tokens, 1, 1), params)
