"""Operations that convert positions in a request to the slots or rows that the attention kernels read.

Source: the sparse MLA backends of vLLM, whose indexer chooses positions in a request and whose kernels take slots.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np

from .. import arrays
from ..arguments import Conversion
from ..bridges import bind
from ..calls.operation import operation
from ..checks.options import LARGEST_INT, require_bool, require_integer, require_together
from ..checks.values import check_positions, check_prefills, check_requests, host
from ..cuda import indices as cuda
from ..dtypes import INT32, INT64
from ..reference import indices as reference
from ..typing import A, AnyArray

__all__ = ["convert_req_index_to_global_index", "convert_to_slots_and_ends", "slots_of"]


@overload
def convert_req_index_to_global_index(
    req_id: AnyArray,
    block_table: AnyArray,
    token_indices: A,
    block_size: int,
    prefill_request_ids: AnyArray | None = None,
    prefill_workspace_starts: AnyArray | None = None,
    return_valid_counts: Literal[False] = False,
    *,
    block_stride_rows: int | None = None,
    out: A | None = None,
) -> A: ...


@overload
def convert_req_index_to_global_index(
    req_id: AnyArray,
    block_table: AnyArray,
    token_indices: A,
    block_size: int,
    prefill_request_ids: AnyArray | None = None,
    prefill_workspace_starts: AnyArray | None = None,
    *,
    return_valid_counts: Literal[True],
    block_stride_rows: int | None = None,
    out: A | None = None,
) -> tuple[A, A]: ...


@overload
def convert_req_index_to_global_index(
    req_id: AnyArray,
    block_table: AnyArray,
    token_indices: A,
    block_size: int,
    prefill_request_ids: AnyArray | None,
    prefill_workspace_starts: AnyArray | None,
    return_valid_counts: Literal[True],
    *,
    block_stride_rows: int | None = None,
    out: A | None = None,
) -> tuple[A, A]: ...


@overload
def convert_req_index_to_global_index(
    req_id: AnyArray,
    block_table: AnyArray,
    token_indices: A,
    block_size: int,
    prefill_request_ids: AnyArray | None = None,
    prefill_workspace_starts: AnyArray | None = None,
    return_valid_counts: bool = False,
    *,
    block_stride_rows: int | None = None,
    out: A | None = None,
) -> A | tuple[A, A]: ...


@operation
def convert_req_index_to_global_index(
    req_id: AnyArray,
    block_table: AnyArray,
    token_indices: A,
    block_size: int,
    prefill_request_ids: AnyArray | None = None,
    prefill_workspace_starts: AnyArray | None = None,
    return_valid_counts: bool = False,
    *,
    block_stride_rows: int | None = None,
    out: A | None = None,
) -> A | tuple[A, A]:
    """Map each query token's chosen positions to slots of the paged cache, or to rows of a gathered workspace.

    For position `i = token_indices[t, k]` the result is
    `block_table[req_id[t], i // block_size] * block_stride_rows + i % block_size`, and for tokens of a prefill
    `p = prefill_request_ids[t] >= 0` it is `prefill_workspace_starts[p] + i`. It is -1 where `i` is negative or
    beyond the block table's width, where the request or the prefill does not exist (a number negative or too large),
    where the block or the prefill's start is negative, and where the result would not fit int32.

    With `return_valid_counts` the entries of each row that are not -1 move to its front, in their order, and are
    counted. Attention takes the counts as `topk_length`.

    Args:
        req_id: [T] int32 request of each token.
        block_table: [R, M] int32 blocks of each request.
        token_indices: [T, K] int32 positions in the token's request, any K.
        block_size: tokens a block.
        prefill_request_ids: [T] int32 number of the prefill that a token belongs to, negative for decode tokens.
        prefill_workspace_starts: [P] int32 first workspace row of each prefill; goes with `prefill_request_ids`.
        return_valid_counts: move the entries of each row that are not -1 to its front, and return how many they are.
        block_stride_rows: rows from a block's first row to the next block's first row. It is larger than `block_size`
            if rows of other layers lie between the blocks of a cache that is read as flat rows. None: `block_size`.
        out: [T, K] int32, written in place when given; may be `token_indices` itself.

    Returns:
        [T, K] int32, entry (t, k) for position (t, k). With `return_valid_counts` [T, K] int32 without gaps, -1 behind
        the last entry, and [T] int32.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a request outside the block table, a position beyond its row of it, a
            prefill that does not exist or whose rows start below 0.

    Example:
        >>> block_table = np.array([[3, 7], [4, 9]], np.int32)  # of two requests, blocks of 16 tokens
        >>> positions = np.array([[0, -1, 17], [16, 2, 3]], np.int32)
        >>> requests = np.array([0, 1], np.int32)
        >>> cupy_mla.convert_req_index_to_global_index(requests, block_table, positions, 16).tolist()
        [[48, -1, 113], [144, 66, 67]]
        >>> slots, counts = cupy_mla.convert_req_index_to_global_index(
        ...     requests, block_table, positions, 16, return_valid_counts=True
        ... )
        >>> slots.tolist(), counts.tolist()
        ([[48, 113, -1], [144, 66, 67]], [2, 3])
    """
    counted = require_bool("return_valid_counts", return_valid_counts)
    given = Conversion(
        req_id, block_table, token_indices, block_size, prefill_request_ids, prefill_workspace_starts, out,
        block_stride_rows, to_front=counted,
    )  # fmt: skip
    slots, counts, _ = _convert(given)
    return (slots, counts) if counted else slots


@operation
def convert_to_slots_and_ends(
    req_id: AnyArray,
    block_table: AnyArray,
    token_indices: A,
    block_size: int,
    prefill_request_ids: AnyArray | None = None,
    prefill_workspace_starts: AnyArray | None = None,
    *,
    block_stride_rows: int | None = None,
    out: A | None = None,
    ends: A | None = None,
) -> tuple[A, A]:
    """`convert_req_index_to_global_index`, and where each row ends. Attention takes the ends as `topk_length`.

    Attention then ignores the entries from a row's end on. Every slot keeps its entry's place, so entries before the
    end may be -1.

    Args:
        req_id, block_table, token_indices, block_size: as for `convert_req_index_to_global_index`.
        prefill_request_ids, prefill_workspace_starts, block_stride_rows: the same.
        out: [T, K] int32, written in place when given; may be `token_indices` itself.
        ends: [T] int32, written in place when given.

    Returns:
        [T, K] int32 slots or workspace rows, and [T] int32: the place behind each row's last entry that is not -1.

    Raises:
        TypeError, ValueError, IndexError: as of `convert_req_index_to_global_index`.

    Example:
        >>> block_table = np.array([[3, 7], [4, 9]], np.int32)  # of two requests, blocks of 16 tokens
        >>> positions = np.array([[0, 17, -1], [16, -1, 3]], np.int32)
        >>> requests = np.array([0, 1], np.int32)
        >>> slots, ends = cupy_mla.convert_to_slots_and_ends(requests, block_table, positions, 16)
        >>> slots.tolist(), ends.tolist()
        ([[48, 113, -1], [144, -1, 67]], [2, 3])
    """
    given = Conversion(
        req_id, block_table, token_indices, block_size, prefill_request_ids, prefill_workspace_starts, out,
        block_stride_rows, ends=ends,
    )  # fmt: skip
    slots, _, ends = _convert(given, ended=True)
    return slots, ends


@operation
def convert_to_front(
    req_id: AnyArray,
    block_table: AnyArray,
    token_indices: A,
    block_size: int,
    prefill_request_ids: AnyArray | None,
    prefill_workspace_starts: AnyArray | None,
    most: AnyArray,
    *,
    out: A,
    counts: A,
) -> None:
    """`convert_req_index_to_global_index` with counts, and of each row no more entries than the caller says.

    Args:
        most: [T] int32 how many of each row's valid entries are kept, the first ones; 0 and below: none.
        out: [T, K] int32, written in place.
        counts: [T] int32 how many entries each row has then, written in place.
    """
    given = Conversion(
        req_id, block_table, token_indices, block_size, prefill_request_ids, prefill_workspace_starts, out,
        valid_counts=counts, to_front=True, most=most,
    )  # fmt: skip
    _convert(given)


@operation
def slots_of(
    block_table: AnyArray,
    positions: A,
    block_size: int,
    *,
    request_ids: AnyArray | None = None,
    out: A | None = None,
) -> A:
    """Slots of positions in requests: `block_table[r, i // block_size] * block_size + i % block_size` for position i.

    `slot_mapping` of `BatchMetadata`, and of the operations that write into caches, has such slots. Index lists for
    attention, int32, come from `convert_req_index_to_global_index`. A slot is -1 where the position is negative or
    beyond the block table's width, and where the request or its block does not exist (its number is negative or too
    large).

    Args:
        block_table: [R, M] int32 blocks of each request.
        positions: [T] or [T, K] int32 or int64. Row t is of request t, or of `request_ids[t]`.
        block_size: tokens a block.
        request_ids: [T] int32 request of each row; None: T is R.
        out: int64 of the shape of `positions`, written in place when given.

    Returns:
        int64 of the shape of `positions`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a request outside the block table, or a position beyond its row of it.

    Example:
        >>> block_table = np.array([[3, 7], [4, 9]], np.int32)  # of two requests, blocks of 16 tokens
        >>> cupy_mla.slots_of(block_table, np.array([17, 2]), 16).tolist()  # a token of each
        [113, 66]
        >>> requests, positions = np.array([0, 1, 1, 1], np.int32), np.array([17, 0, 1, 2])
        >>> cupy_mla.slots_of(block_table, positions, 16, request_ids=requests).tolist()
        [113, 64, 65, 66]
    """
    block_size = require_integer("block_size", block_size, 1)
    place, (table, positions_) = bind(block_table=block_table, positions=positions)
    ids, out_ = place.optional(request_ids=request_ids, out=out)
    requests = table.require(INT32, "R", "M").shape[0]
    rows, *k = positions_.require((INT32, INT64), *("T", "K")[: max(len(positions_.shape), 1)]).shape
    if ids is not None:
        ids.require(INT32, rows)
    elif rows != requests:
        raise ValueError(
            f"positions: block_table gives {requests} rows, one a request, got {rows}; rows of other numbers go with "
            "request_ids"
        )
    out_ = place.output("out", out_, (rows, *k), INT64)
    if arrays.CHECK_VALUES:
        if ids is not None:
            check_requests(ids, requests)
        check_positions(positions_, table, block_size)
    place.call(cuda.slots_of, reference.slots_of, table, positions_, block_size, ids, out_)
    return out_.obj


def require_block_stride(stride: int | None, block_size: int) -> int | None:
    """Check `block_stride_rows`."""
    if stride is None:
        return None
    return require_integer("block_stride_rows", stride, block_size, LARGEST_INT, "the rows of a block at least")


def _convert(given: Conversion, *, ended: bool = False) -> tuple[Any, Any, Any]:
    """Check the arguments and convert.

    Args:
        given: the caller's arrays and settings, unchecked.
        ended: also find where each row ends.

    Returns:
        the slots; with `to_front` their counts, else None; and the ends or None.
    """
    block_size = require_integer("block_size", given.block_size, 1)
    stride = require_block_stride(given.block_stride_rows, block_size)
    prefills = {
        "prefill_request_ids": given.prefill_request_ids, "prefill_workspace_starts": given.prefill_workspace_starts
    }  # fmt: skip
    require_together(**prefills)
    place, (req, table, positions) = bind(
        req_id=given.req_id, block_table=given.block_table, token_indices=given.token_indices
    )
    prefill, starts, out_, ends_, counts, most = place.optional(
        **prefills, out=given.out, ends=given.ends, valid_counts=given.valid_counts, most=given.most
    )
    tokens, k = positions.require(INT32, "T", "K").shape
    req.require(INT32, tokens)
    table.require(INT32, "R", "M")
    if prefill is not None and starts is not None:
        prefill.require(INT32, tokens)
        starts.require(INT32, "P")
    if most is not None:
        most.require(INT32, tokens)
    out_ = place.output("out", out_, (tokens, k), INT32, may_be=positions)
    counts = place.output("valid_counts", counts, (tokens,), INT32) if given.to_front else None
    ends_ = place.output("ends", ends_, (tokens,), INT32) if ended else None
    if arrays.CHECK_VALUES:
        check_requests(req, table.shape[0])
        numbers = np.full(tokens, -1) if prefill is None else host(prefill)
        if prefill is not None and starts is not None:
            check_prefills(prefill, starts)
        check_positions(positions, table, block_size, numbers < 0)
    place.call(
        cuda.convert_req_index_to_global_index, reference.convert_req_index_to_global_index,
        Conversion(
            req, table, positions, block_size, prefill, starts, out_, stride, counts, ends_, to_front=given.to_front,
            most=most,
        ),
    )  # fmt: skip
    return out_.obj, counts and counts.obj, ends_ and ends_.obj
