"""Selection: the KV rows with the largest logits, exact and deterministic.

The k largest entries of a row of logits are chosen; of equal ones those with lower indices (+0 and -0 are equal), and
NaN is less than every number. Results ascend by position, with -1 behind the last: attention is faster over ascending
lists.

Source: DeepSeek-V3.2 (DeepSeek Sparse Attention).
"""

from __future__ import annotations

import numpy as np

from .. import arrays
from ..arguments import PagedKeys, RaggedKeys, Selection
from ..arrays import Array
from ..bridges import bind
from ..calls.operation import operation
from ..checks.options import require_bool, require_integer, require_together
from ..checks.values import check_ranges, check_requests
from ..cuda import topk as cuda
from ..dtypes import BFLOAT16, FLOAT32, INT32
from ..reference import topk as reference
from ..typing import A, AnyArray
from .logits import require_paged, require_ragged

__all__ = ["select_rows", "select_rows_paged", "topk_indices"]

MAX_K = 4096
MAX_WORKSPACE_BYTES = 512 << 20
MOST_BYTES = int(np.iinfo(np.int64).max)


@operation
def topk_indices(
    logits: A,
    k: int,
    starts: AnyArray | None = None,
    ends: AnyArray | None = None,
    *,
    sort: bool = True,
    out: A | None = None,
) -> A:
    """Positions of the k largest logits of each row's range, exact and deterministic.

    Of equal ones those with lower positions are chosen (+0 and -0 are equal), and NaN is less than every number.

    Args:
        logits: [M, N] float32 or bfloat16, any row stride.
        k: 1 to 4096.
        starts, ends: [M] int32; the range of row i is `max(starts[i], 0) <= column < min(ends[i], N)`. Default: the
            whole row.
        sort: results ascend by position. With False they may have any order, but ascend all the same.
        out: [M, k] int32, written in place when given.

    Returns:
        [M, k] int32, relative to the start of the range; -1 behind the last if the range is shorter than k.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a range that starts below 0 or ends beyond N.

    Example:
        >>> logits = np.array([[3, 7, 7, 1, 7]], np.float32)
        >>> cupy_mla.topk_indices(logits, 2).tolist()  # of three equal ones the first two
        [[1, 2]]
        >>> cupy_mla.topk_indices(logits, 4, np.array([2], np.int32)).tolist()  # from column 2 on, which is position 0
        [[0, 1, 2, -1]]
    """
    k = require_integer("k", k, 1, MAX_K)
    require_bool("sort", sort)
    place, (logits_,) = bind(logits=logits)
    starts_, ends_, out_ = place.optional(starts=starts, ends=ends, out=out)
    rows, width = logits_.require((FLOAT32, BFLOAT16), "M", "N").shape
    for bounds in (starts_, ends_):
        if bounds is not None:
            bounds.require(INT32, rows)
    if arrays.CHECK_VALUES:
        check_ranges(starts_, ends_, width)
    out_ = place.output("out", out_, (rows, k), INT32)
    place.call(cuda.topk_indices, reference.topk_indices, logits_, k, starts_, ends_, out_)
    return out_.obj


@operation
def select_rows(
    q8: A,
    k8: AnyArray,
    ks: AnyArray,
    w: AnyArray,
    starts: AnyArray,
    ends: AnyArray,
    k: int,
    *,
    req_id: AnyArray | None = None,
    block_table: AnyArray | None = None,
    block_size: int | None = None,
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
    out: A | None = None,
    blocks: AnyArray | None = None,
) -> A:
    """The k keys with the largest logits for each query token, keys in rows: `topk_indices` of `indexer_logits`.

    Args:
        q8, k8, ks, w, starts, ends: as for `indexer_logits`.
        k: 1 to 4096.
        req_id: [M] int32 request of each token; goes with `block_table` and `block_size`.
        block_table: [R, width] int32 blocks of each request. With it the results are slots of the paged KV cache, as
            `convert_req_index_to_global_index` gives them, instead of positions.
        block_size: tokens a block of that cache.
        max_workspace_bytes: limit of the memory for logits. Queries are worked on in chunks that fit it, of at least
            one.
        out: [M, k] int32, written in place when given.
        blocks: [M, C] int32, C up to 4096, when given: the `candidate_blocks` of the same logits are written to it.

    Returns:
        [M, k] int32: positions relative to the token's start, or slots, ascending by position; -1 behind the last.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a range that starts below 0 or ends beyond N, a request that the block
            table does not have.

    Example:
        >>> q8, w = np.ones((1, 8, 128), float8_e4m3fn), np.ones((1, 8), np.float32)  # 1 query token, 8 heads
        >>> k8 = np.repeat(np.array([[1], [-1], [2], [3]], float8_e4m3fn), 128, axis=1)  # 4 keys
        >>> ks, start, end = np.ones(4, np.float32), np.array([0], np.int32), np.array([4], np.int32)
        >>> cupy_mla.select_rows(q8, k8, ks, w, start, end, 2).tolist()
        [[2, 3]]
        >>> in_cache = {"req_id": np.array([0], np.int32), "block_table": np.array([[5]], np.int32), "block_size": 64}
        >>> cupy_mla.select_rows(q8, k8, ks, w, start, end, 2, **in_cache).tolist()  # slots in block 5
        [[322, 323]]
    """
    k = require_integer("k", k, 1, MAX_K)
    max_workspace_bytes = require_integer("max_workspace_bytes", max_workspace_bytes, 1, MOST_BYTES)
    if block_size is not None:
        block_size = require_integer("block_size", block_size, 1)
    require_together(req_id=req_id, block_table=block_table, block_size=block_size)
    place, given = bind(q8=q8, k8=k8, ks=ks, w=w, starts=starts, ends=ends)
    requests, table, out_, blocks_ = place.optional(req_id=req_id, block_table=block_table, out=out, blocks=blocks)
    of = RaggedKeys(*given)
    queries, _ = require_ragged(of)
    if requests is not None and table is not None:
        requests.require(INT32, queries)
        table.require(INT32, "R", "width")
        if arrays.CHECK_VALUES:
            check_requests(requests, table.shape[0])
    out_ = place.output("out", out_, (queries, k), INT32)
    _require_blocks(blocks_, queries)
    place.call(
        cuda.select_rows, reference.select_rows,
        of, Selection(k, max_workspace_bytes, out_, blocks_), requests, table, block_size,
    )  # fmt: skip
    return out_.obj


@operation
def select_rows_paged(
    q8: A,
    kv_cache: AnyArray,
    w: AnyArray,
    context_lens: AnyArray,
    block_table: AnyArray,
    max_context_len: int,
    k: int,
    *,
    slots: bool = False,
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
    schedule: AnyArray | None = None,
    out: A | None = None,
    blocks: AnyArray | None = None,
) -> A:
    """The k keys with the largest logits for each query token, keys in the paged cache: `topk_indices` of
    `paged_indexer_logits`.

    Args:
        q8, kv_cache, w, context_lens, block_table: as for `paged_indexer_logits`.
        max_context_len: keys beyond it are ignored. If it is at most `k`, no logits are computed.
        k: 1 to 4096.
        slots: return slots by the same block table and block size, instead of positions in the request.
        max_workspace_bytes: limit of the memory for logits. Requests are worked on in chunks that fit it, of at least
            one.
        schedule: as for `paged_indexer_logits`; it is ignored if there are several chunks.
        out: [B * n, k] int32, written in place when given.
        blocks: [B * n, C] int32, C up to 4096, when given: the `candidate_blocks` of the same logits are written to it.

    Returns:
        [B * n, k] int32: positions, or slots, ascending by position; -1 behind the last.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: as for `paged_indexer_logits`.

    Example:
        >>> cache = np.zeros((2, 64, 132), np.uint8)
        >>> keys = np.repeat(np.array([[1], [-1], [2]], bfloat16), 128, axis=1)
        >>> cupy_mla.indexer_k_quant_and_cache(keys, cache, np.array([64, 65, 66]))  # block 1
        >>> q8, w = np.ones((1, 1, 8, 128), float8_e4m3fn), np.ones((1, 8), np.float32)
        >>> lens, table = np.array([3], np.int32), np.array([[1]], np.int32)
        >>> cupy_mla.select_rows_paged(q8, cache, w, lens, table, 64, k=2).tolist()
        [[0, 2]]
        >>> cupy_mla.select_rows_paged(q8, cache, w, lens, table, 64, k=2, slots=True).tolist()
        [[64, 66]]
    """
    max_context_len = require_integer("max_context_len", max_context_len, 0)
    k = require_integer("k", k, 1, MAX_K)
    require_bool("slots", slots)
    max_workspace_bytes = require_integer("max_workspace_bytes", max_workspace_bytes, 1, MOST_BYTES)
    place, (q8_, cache, w_, lens, table) = bind(
        q8=q8, kv_cache=kv_cache, w=w, context_lens=context_lens, block_table=block_table
    )
    schedule_, out_, blocks_ = place.optional(schedule=schedule, out=out, blocks=blocks)
    of = PagedKeys(q8_, cache, w_, lens, table, schedule_)
    queries = require_paged(of, max_context_len)
    out_ = place.output("out", out_, (queries, k), INT32)
    _require_blocks(blocks_, queries)
    place.call(
        cuda.select_rows_paged, reference.select_rows_paged,
        of, Selection(k, max_workspace_bytes, out_, blocks_), max_context_len, slots,
    )  # fmt: skip
    return out_.obj


def _require_blocks(blocks: Array | None, queries: int) -> None:
    """Check the array to which candidate blocks are written."""
    if blocks is None:
        return
    count = blocks.require(INT32, queries, "C").require_writable().shape[1]
    require_integer("blocks.shape[1]", count, 1, MAX_K)
