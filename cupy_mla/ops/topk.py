"""Selection: the KV rows with the largest logits, exact and deterministic.

A row of logits keeps its k largest entries; of equal ones those with lower indices (+0 and -0 are equal), and NaN is
less than every number. Results are ascending by position, which attention gains from, with -1 behind the last.

Source: DeepSeek-V3.2 (DeepSeek Sparse Attention).
"""

from __future__ import annotations

from typing import Any

from ..bridges import bind
from ..calls.signature import operation
from ..cuda import topk as cuda
from ..layouts import BFLOAT16
from ..reference import topk as reference
from .logits import require_paged, require_ragged
from .validate import FLOAT32, INT32

MAX_K = 4096
MAX_WORKSPACE_BYTES = 512 << 20


@operation
def topk_indices(
    logits: Any, k: int, starts: Any = None, ends: Any = None, *, sort: bool = True, out: Any = None
) -> Any:
    """Positions of the k largest logits of each row's range.

    Args:
        logits: [M, N] float32 or bfloat16, any row stride.
        k: 1 to 4096.
        starts, ends: [M] int32; row i is looked at from `max(starts[i], 0)` to before `min(ends[i], N)`. Default: all
            of it.
        sort: ascending by position; without, in any order.
        out: [M, k] int32, written in place when given.

    Returns:
        [M, k] int32, relative to the row's start; -1 behind the last where the range is shorter than k.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
    """
    place, (logits_,) = bind(logits=logits)
    starts_, ends_, out_ = place.optional(starts=starts, ends=ends, out=out)
    rows, _ = logits_.require((FLOAT32, BFLOAT16), "M", "N").shape
    _require_k(k)
    for bounds in (starts_, ends_):
        if bounds is not None:
            bounds.require(INT32, rows)
    out_ = place.output("out", out_, (rows, k), INT32)
    place.call(cuda.topk_indices, reference.topk_indices, logits_, k, starts_, ends_, sort, out_)
    return out_.obj


@operation
def select_rows(
    q8: Any,
    k8: Any,
    ks: Any,
    w: Any,
    starts: Any,
    ends: Any,
    k: int,
    *,
    req_id: Any = None,
    block_table: Any = None,
    block_size: int | None = None,
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
    out: Any = None,
) -> Any:
    """The k keys with the largest logits for each query token, keys in rows: `topk_indices` of `indexer_logits`.

    Args:
        q8, k8, ks, w, starts, ends: as for `indexer_logits`.
        k: 1 to 4096.
        req_id: [M] int32 request of each token; goes with `block_table` and `block_size`.
        block_table: [R, width] int32 blocks of each request. With it the results are slots of the paged KV cache, as
            `convert_req_index_to_global_index` gives them, instead of positions.
        block_size: tokens a block of that cache.
        max_workspace_bytes: most memory that logits take; more queries are worked on in chunks, of one query at least.
        out: [M, k] int32, written in place when given.

    Returns:
        [M, k] int32: positions relative to the token's start, or slots, ascending by position; -1 behind the last.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
    """
    if (req_id is None) != (block_table is None) or (block_table is None) != (block_size is None):
        raise ValueError("req_id, block_table and block_size must be given together")
    place, (q8_, k8_, ks_, w_, starts_, ends_) = bind(q8=q8, k8=k8, ks=ks, w=w, starts=starts, ends=ends)
    requests, table, out_ = place.optional(req_id=req_id, block_table=block_table, out=out)
    queries, _ = require_ragged(q8_, k8_, ks_, w_, starts_, ends_)
    _require_k(k)
    _require_workspace(max_workspace_bytes)
    if requests is not None and table is not None and block_size is not None:
        requests.require(INT32, queries)
        table.require(INT32, "R", "width")
        if block_size < 1:
            raise ValueError(f"block_size must be >= 1, got {block_size}")
    out_ = place.output("out", out_, (queries, k), INT32)
    place.call(
        cuda.select_rows, reference.select_rows,
        q8_, k8_, ks_, w_, starts_, ends_, k, requests, table, block_size, max_workspace_bytes, out_,
    )  # fmt: skip
    return out_.obj


@operation
def select_rows_paged(
    q8: Any,
    kv_cache: Any,
    w: Any,
    context_lens: Any,
    block_table: Any,
    max_context_len: int,
    k: int,
    *,
    slots: bool = False,
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
    out: Any = None,
) -> Any:
    """The k keys with the largest logits for each query token, keys in the paged cache: `topk_indices` of
    `paged_indexer_logits`.

    Args:
        q8, kv_cache, w, context_lens, block_table, max_context_len: as for `paged_indexer_logits`.
        k: 1 to 4096.
        slots: return slots by the same block table and block size, instead of positions in the request.
        max_workspace_bytes: most memory that logits take; more requests are worked on in chunks, of one request at
            least.
        out: [B * n, k] int32, written in place when given.

    Returns:
        [B * n, k] int32: positions, or slots, ascending by position; -1 behind the last.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
    """
    place, (q8_, cache, w_, lens, table) = bind(
        q8=q8, kv_cache=kv_cache, w=w, context_lens=context_lens, block_table=block_table
    )
    (out_,) = place.optional(out=out)
    queries = require_paged(q8_, cache, w_, lens, table, max_context_len)
    _require_k(k)
    _require_workspace(max_workspace_bytes)
    out_ = place.output("out", out_, (queries, k), INT32)
    place.call(
        cuda.select_rows_paged, reference.select_rows_paged,
        q8_, cache, w_, lens, table, max_context_len, k, slots, max_workspace_bytes, out_,
    )  # fmt: skip
    return out_.obj


def _require_k(k: int) -> None:
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k must be 1 to {MAX_K}, got {k}")


def _require_workspace(nbytes: int) -> None:
    if nbytes < 1:
        raise ValueError(f"max_workspace_bytes must be >= 1, got {nbytes}")
