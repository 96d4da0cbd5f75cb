"""Operations on the index lists of DeepSeek V4's and V4.1's compressed rows: one row for every `compress_ratio` tokens.

The token that completes a group of `compress_ratio` tokens owns their row: the token at position p with
`(p + 1) % compress_ratio == 0` owns compressed position `p // compress_ratio`. For a query token at position p,
`(p + 1) // compress_ratio` rows are complete. It attends over those that an indexer chose (C4A of V4, C1A and C2A of
V4.1) or over all (C128A).

`block_size` is that of the compressed cache, in compressed rows.

Source: DeepSeek-V4 and V4.1; the contracts are those of vLLM's backends.
"""

from __future__ import annotations

from typing import Any

from .. import arrays
from ..arguments import C128aLists, CompressedSlots, Conversion
from ..bridges import bind
from ..calls.operation import operation
from ..checks.options import require_integer
from ..checks.values import check_lengths, check_offsets, check_positions, check_requests, host
from ..cuda import compressed as cuda
from ..cuda import indices as cuda_indices
from ..dtypes import BOOL, INT32, INT64
from ..reference import compressed as reference
from ..reference import indices as reference_indices
from ..typing import A, AnyArray
from .context_parallel import MAX_INTERLEAVE, MAX_RANKS
from .indices import require_block_stride

__all__ = ["build_c128a_topk_metadata", "compute_global_topk_indices_and_lens", "get_compressed_slot_mapping"]


@operation
def compute_global_topk_indices_and_lens(
    topk_indices: A,
    token_to_req: AnyArray,
    block_table: AnyArray,
    block_size: int,
    is_valid_token: AnyArray,
    *,
    block_stride_rows: int | None = None,
    out: A | None = None,
    lens: AnyArray | None = None,
) -> tuple[A, A]:
    """Map each query token's chosen compressed positions to slots, and count those that have one.

    The mapping is that of `cupy_mla.convert_req_index_to_global_index`. Slots keep their entries' places, so a count is
    a list's length only if -1 stands at the list's end alone.

    Args:
        topk_indices: [T, K] int32 compressed positions in the token's request, -1 at the end where there are fewer.
        token_to_req: [T] int32 request of each token.
        block_table: [R, M] int32 blocks of each request.
        block_size: rows a block.
        is_valid_token: [T] bool; a token that is not valid has a count of 0.
        block_stride_rows: as for `cupy_mla.convert_req_index_to_global_index`.
        out: [T, K] int32, written in place when given; may be `topk_indices` itself.
        lens: [T] int32, written in place when given.

    Returns:
        [T, K] int32 slots, and [T] int32 counts of the slots that are not negative.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a valid token names a request that does not
            exist, or a position beyond its row of the block table.

    Example:
        >>> chosen, request = np.array([[0, 5, -1]], np.int32), np.array([0], np.int32)
        >>> block_table, valid = np.array([[3]], np.int32), np.array([True])
        >>> slots, lens = cupy_mla.compute_global_topk_indices_and_lens(chosen, request, block_table, 64, valid)
        >>> slots.tolist(), lens.tolist()
        ([[192, 197, -1]], [2])
    """
    block_size = require_integer("block_size", block_size, 1)
    block_stride_rows = require_block_stride(block_stride_rows, block_size)
    place, (chosen, req, table, valid) = bind(
        topk_indices=topk_indices, token_to_req=token_to_req, block_table=block_table, is_valid_token=is_valid_token
    )
    out_, lens_ = place.optional(out=out, lens=lens)
    tokens, k = chosen.require(INT32, "T", "K").shape
    req.require(INT32, tokens)
    table.require(INT32, "R", "M")
    valid.require(BOOL, tokens)
    out_ = place.output("out", out_, (tokens, k), INT32, may_be=chosen)
    lens_ = place.output("lens", lens_, (tokens,), INT32)
    if arrays.CHECK_VALUES:
        check_requests(req, table.shape[0], valid)
        check_positions(chosen, table, block_size, host(valid))
    place.call(
        cuda_indices.convert_req_index_to_global_index, reference_indices.convert_req_index_to_global_index,
        Conversion(req, table, chosen, block_size, None, None, out_, block_stride_rows, lens_, is_valid_token=valid),
    )  # fmt: skip
    return out_.obj, lens_.obj


def get_compressed_slot_mapping(
    num_tokens: int,
    query_start_loc: AnyArray,
    seq_lens: A,
    block_table: AnyArray,
    block_size: int,
    compress_ratio: int,
    out: A | None = None,
    *,
    slot_mapping: AnyArray | None = None,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave: int = 1,
) -> A:
    """Slot of the compressed row that each query token owns, -1 for tokens that own none.

    The query tokens of a request are the last ones of its sequence.

    In decode context parallelism the rows of each sequence are distributed over ranks. The row at compressed position c
    lies on rank `c // cp_interleave % dcp_world_size`, as that rank's row
    `c // (dcp_world_size * cp_interleave) * cp_interleave + c % cp_interleave`.

    Args:
        num_tokens: query tokens, T.
        query_start_loc: [R + 1] int32 first token of each request. Tokens behind the last request own no row.
        seq_lens: [R] int32 tokens of each sequence, those of this step included.
        block_table: [R, M] int32 blocks of each request.
        block_size: rows a block.
        compress_ratio: tokens that a row stands for.
        out: [T'] int64 with T' >= T, when given: written in place, -1 from T on.
        slot_mapping: [at least T] int64 slots of the tokens themselves. A token with a negative slot, which pads the
            batch, gets -1. None: no tokens pad.
        dcp_world_size, dcp_rank: the number of ranks, and the number of this one.
        cp_interleave: consecutive compressed rows that lie on one rank; `block_size` must be a multiple of it.

    Returns:
        [T] int64: the first T entries of `out`. -1 also where the row's block does not exist, or is another rank's.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: `query_start_loc` goes down or a length is negative.

    Example:
        >>> starts, lengths = np.array([0, 5], np.int32), np.array([9], np.int32)  # tokens at positions 4 to 8
        >>> block_table = np.array([[3]], np.int32)
        >>> cupy_mla.get_compressed_slot_mapping(5, starts, lengths, block_table, 64, compress_ratio=4).tolist()
        [-1, -1, -1, 193, -1]
    """
    return write_compressed_slot_mapping(
        num_tokens, query_start_loc, seq_lens, block_table, block_size, compress_ratio, out, slot_mapping=slot_mapping,
        dcp_world_size=dcp_world_size, dcp_rank=dcp_rank, cp_interleave=cp_interleave,
    )[:num_tokens]  # fmt: skip


@operation
def write_compressed_slot_mapping(
    num_tokens: int,
    query_start_loc: AnyArray,
    seq_lens: A,
    block_table: AnyArray,
    block_size: int,
    compress_ratio: int,
    out: A | None = None,
    *,
    slot_mapping: AnyArray | None = None,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave: int = 1,
) -> Any:
    """`get_compressed_slot_mapping`, but it returns the whole of `out`."""
    num_tokens = require_integer("num_tokens", num_tokens, 0)
    block_size = require_integer("block_size", block_size, 1)
    compress_ratio = require_integer("compress_ratio", compress_ratio, 1)
    world_size = require_integer("dcp_world_size", dcp_world_size, 1, MAX_RANKS)
    rank = require_integer("dcp_rank", dcp_rank, 0, world_size - 1, "below dcp_world_size")
    interleave = require_integer("cp_interleave", cp_interleave, 1, MAX_INTERLEAVE)
    if world_size > 1 and block_size % interleave:
        raise ValueError(f"block_size: expected a multiple of cp_interleave {interleave}, got {block_size}")
    place, (starts, seq, table) = bind(query_start_loc=query_start_loc, seq_lens=seq_lens, block_table=block_table)
    slots, out_ = place.optional(slot_mapping=slot_mapping, out=out)
    requests = table.require(INT32, "R", "M").shape[0]
    seq.require(INT32, requests)
    starts.require(INT32, requests + 1)
    if out_ is None:
        out_ = place.output("out", None, (num_tokens,), INT64)
    elif out_.require(INT64, "T").require_writable().shape[0] < num_tokens:
        raise ValueError(f"out: expected at least num_tokens = {num_tokens} entries, got {out_.shape[0]}")
    if slots is not None and slots.require(INT64, "T").shape[0] < num_tokens:
        raise ValueError(f"slot_mapping: expected at least num_tokens = {num_tokens} entries, got {slots.shape[0]}")
    if arrays.CHECK_VALUES:
        check_offsets(starts)
        check_lengths(seq)
    place.call(
        cuda.get_compressed_slot_mapping, reference.get_compressed_slot_mapping,
        CompressedSlots(
            num_tokens, starts, seq, table, block_size, compress_ratio, slots, world_size, rank, interleave, out_
        ),
    )  # fmt: skip
    return out_.obj


def build_c128a_topk_metadata(
    positions: AnyArray,
    compress_ratio: int,
    num_decode_tokens: int,
    token_to_req: AnyArray,
    block_table: AnyArray,
    block_size: int,
    slot_mapping: AnyArray,
    decode_indices: A,
    decode_lens: AnyArray,
    prefill_indices: AnyArray,
    max_compressed_tokens: int,
) -> tuple[A, A, A]:
    """Index lists of layers whose query tokens attend over every complete compressed row (C128A).

    A token at position p attends over `n = min((p + 1) // compress_ratio, max_compressed_tokens)` rows, 0 .. n - 1. The
    first `num_decode_tokens` tokens get their slots, the others the numbers themselves.

    Args:
        positions: [T] int64 place of each token in its sequence.
        compress_ratio: tokens that a row stands for.
        num_decode_tokens: tokens of decodes, which stand first.
        token_to_req: [T] int32 request of each token.
        block_table: [R, M] int32 blocks of each request.
        block_size: rows a block.
        slot_mapping: [T] int64 slot that each token itself goes to; a decode token with a negative one attends nothing.
        decode_indices: [Td, W] int32 with Td >= num_decode_tokens, W >= max_compressed_tokens; written in place.
        decode_lens: [Td] int32, written in place.
        prefill_indices: [Tp, W'] int32 with Tp >= T - num_decode_tokens, W' >= max_compressed_tokens; written in place.
        max_compressed_tokens: rows of the longest sequence.

    Returns:
        the written parts of the three: [num_decode_tokens, W] slots, -1 past n and where a block does not exist,
        [num_decode_tokens] int32 n, and [T - num_decode_tokens, W'], -1 past n.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a request does not exist or a position is negative.

    Example:
        >>> positions, request = np.array([400, 300]), np.array([0, 1], np.int32)  # a decode, then a prefill's token
        >>> block_table, own_slots = np.array([[3], [4]], np.int32), np.array([1, 2])
        >>> buffers = np.zeros((1, 4), np.int32), np.zeros(1, np.int32), np.zeros((1, 4), np.int32)
        >>> slots, lens, rows = cupy_mla.build_c128a_topk_metadata(
        ...     positions, 128, 1, request, block_table, 64, own_slots, *buffers, 4
        ... )
        >>> slots.tolist(), lens.tolist(), rows.tolist()  # 3 and 2 complete rows
        ([[192, 193, 194, -1]], [3], [[0, 1, -1, -1]])
    """
    write_c128a_topk_metadata(
        positions, compress_ratio, num_decode_tokens, token_to_req, block_table, block_size, slot_mapping,
        decode_indices, decode_lens, prefill_indices, max_compressed_tokens,
    )  # fmt: skip
    prefill_tokens = positions.shape[0] - num_decode_tokens
    return (
        _first(decode_indices, num_decode_tokens), _first(decode_lens, num_decode_tokens),
        _first(prefill_indices, prefill_tokens),
    )  # fmt: skip


def _first(array: Any, rows: int) -> Any:
    """The first rows of an array. If these are all, it is the array itself, which takes less host time than a view."""
    return array if rows == array.shape[0] else array[:rows]


@operation
def write_c128a_topk_metadata(
    positions: AnyArray,
    compress_ratio: int,
    num_decode_tokens: int,
    token_to_req: AnyArray,
    block_table: AnyArray,
    block_size: int,
    slot_mapping: AnyArray,
    decode_indices: AnyArray,
    decode_lens: AnyArray,
    prefill_indices: AnyArray,
    max_compressed_tokens: int,
) -> None:
    """`build_c128a_topk_metadata` without its results, which are views of what this writes."""
    block_size = require_integer("block_size", block_size, 1)
    compress_ratio = require_integer("compress_ratio", compress_ratio, 1)
    max_compressed_tokens = require_integer("max_compressed_tokens", max_compressed_tokens, 0)
    place, (pos, req, table, slots, decode, lens, prefill) = bind(
        positions=positions, token_to_req=token_to_req, block_table=block_table, slot_mapping=slot_mapping,
        decode_indices=decode_indices, decode_lens=decode_lens, prefill_indices=prefill_indices,
    )  # fmt: skip
    tokens = pos.require(INT64, "T").shape[0]
    req.require(INT32, tokens)
    slots.require(INT64, tokens)
    table.require(INT32, "R", "M")
    num_decode_tokens = require_integer("num_decode_tokens", num_decode_tokens, 0, tokens, "the tokens there are")
    rows = decode.require(INT32, "Td", "W").require_writable().shape[0]
    lens.require(INT32, rows).require_writable()
    prefill.require(INT32, "Tp", "W").require_writable()
    for buffer, needed in ((decode, num_decode_tokens), (prefill, tokens - num_decode_tokens)):
        if buffer.shape[0] < needed or buffer.shape[1] < max_compressed_tokens:
            raise ValueError(
                f"{buffer.name}: expected at least {needed} rows of {max_compressed_tokens}, got {list(buffer.shape)}"
            )
    if arrays.CHECK_VALUES:
        check_requests(req, table.shape[0])
        check_lengths(pos)
    place.call(
        cuda.build_c128a_topk_metadata, reference.build_c128a_topk_metadata,
        C128aLists(
            pos, compress_ratio, num_decode_tokens, req, table, block_size, slots, decode, lens, prefill,
            max_compressed_tokens,
        ),
    )  # fmt: skip
