"""Candidate blocks of the indexer: one layer chooses blocks of keys, and later layers score only the keys in them.

A block is 8 neighbouring keys of a request: block c has the keys at positions 8 c to 8 c + 7. One layer scores all
keys, and chooses for each query token the blocks with the largest logits (`candidate_blocks`; `select_rows` and
`select_rows_paged` do so on request). The layers after it read the 8 C keys of C blocks, not the whole context.

Source: DeepSeek-V4.1, whose layer 20 chooses 2048 blocks for the index layers after it.
"""

from __future__ import annotations

from .. import arrays
from ..arguments import CandidateKeys, Selection
from ..bridges import bind
from ..calls.operation import operation
from ..checks.options import require_integer
from ..checks.validate import MULTIPLIED
from ..checks.values import check_ranges, check_requests
from ..cuda import logits as cuda_logits
from ..cuda import topk as cuda
from ..dtypes import FLOAT32, INT32
from ..reference import logits as reference_logits
from ..reference import topk as reference
from ..typing import A, AnyArray
from .indexer import indexer_layout
from .logits import HEADS, D, require_rows
from .topk import MAX_K, MAX_WORKSPACE_BYTES, MOST_BYTES

__all__ = ["candidate_blocks", "candidate_logits", "select_candidate_rows"]

BLOCK = reference_logits.CANDIDATE_BLOCK  # keys


@operation
def candidate_blocks(
    logits: A, count: int, starts: AnyArray | None = None, ends: AnyArray | None = None, *, out: A | None = None
) -> A:
    """The blocks of 8 logits that have the largest logits of each row's range.

    A block's score is its largest logit. It is +inf for the range's last block, which may be shorter, and for blocks
    with a NaN. Of blocks with equal scores the lower ones are chosen. So the last block is left out if `count` others
    have a NaN or an infinity.

    Args:
        logits: [M, N] float32, any row stride.
        count: blocks of a row, 1 to 4096.
        starts, ends: [M] int32 ranges, as for `topk_indices`.
        out: [M, count] int32, written in place when given.

    Returns:
        [M, count] int32 numbers of blocks, counted from the row's start, ascending; -1 behind the last.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a range that starts below 0 or ends beyond N.

    Example:
        >>> logits = np.zeros((1, 30), np.float32)
        >>> logits[0, [3, 20]] = 1, 2  # in blocks 0 and 2; the last one is block 3
        >>> cupy_mla.candidate_blocks(logits, 2).tolist()
        [[2, 3]]
    """
    count = require_integer("count", count, 1, MAX_K)
    place, (logits_,) = bind(logits=logits)
    starts_, ends_, out_ = place.optional(starts=starts, ends=ends, out=out)
    rows, width = logits_.require(FLOAT32, "M", "N").shape
    for bounds in (starts_, ends_):
        if bounds is not None:
            bounds.require(INT32, rows)
    if arrays.CHECK_VALUES:
        check_ranges(starts_, ends_, width)
    out_ = place.output("out", out_, (rows, count), INT32)
    place.call(cuda.candidate_blocks, reference.candidate_blocks, logits_, starts_, ends_, out_)
    return out_.obj


@operation
def candidate_logits(
    q8: A,
    kv_cache: AnyArray,
    w: AnyArray,
    candidates: AnyArray,
    lens: AnyArray,
    req_id: AnyArray,
    block_table: AnyArray,
    *,
    out: A | None = None,
) -> A:
    """Logits of query tokens over the keys of candidate blocks in the paged cache, as `indexer_logits` defines them. No
    other keys are read.

    Entry 8 c + i of a row belongs to the key at position 8 * candidates[row, c] + i. It is -inf where there is no such
    block or key.

    Args:
        q8: [T, H, 128] uint8 or float8_e4m3fn, H a multiple of 8 up to 64; rows at multiples of 16 bytes.
            float8_e5m2 if they were rounded to MXFP4, as for `paged_indexer_logits`.
        kv_cache: [num_blocks, block_size, (1,) 132] uint8 or float8_e4m3fn in layout INDEXER_FP8, or [..., 68] in
            layout INDEXER_MXFP4.
        w: [T, H] float32 weights of the heads, as `quantize_indexer_q` returns them.
        candidates: [T, C] int32 numbers of blocks, as `candidate_blocks` returns them: at most as many as the token
            has, which are the first of the row, then -1.
        lens: [T] int32 keys that each token sees.
        req_id: [T] int32 request of each token. Tokens of a request that the block table does not have see no keys.
        block_table: [R, width] int32 blocks of each request.
        out: [T, 8 * C] float32, written in place when given.

    Returns:
        [T, 8 * C] float32.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a request that the block table does not have.

    Example:
        >>> cache = np.zeros((2, 64, 132), np.uint8)
        >>> keys = np.repeat(np.arange(20, dtype=np.float32)[:, None], 128, axis=1).astype(bfloat16)
        >>> cupy_mla.indexer_k_quant_and_cache(keys, cache, np.arange(64, 84), "ue8m0")  # block 1
        >>> q8, w = np.ones((1, 8, 128), float8_e4m3fn), np.full((1, 8), 2**-10, np.float32)
        >>> lens, request, table = np.array([18], np.int32), np.array([0], np.int32), np.array([[1]], np.int32)
        >>> candidates = np.array([[2]], np.int32)  # keys 16 to 23, of which the token sees two
        >>> cupy_mla.candidate_logits(q8, cache, w, candidates, lens, request, table)[0, :3].tolist()
        [16.0, 16.0, -inf]
    """
    place, given = bind(
        q8=q8, kv_cache=kv_cache, w=w, candidates=candidates, lens=lens, req_id=req_id, block_table=block_table
    )
    (out_,) = place.optional(out=out)
    of = CandidateKeys(*given)
    tokens, blocks = _require(of)
    out_ = place.output("out", out_, (tokens, blocks * BLOCK), FLOAT32)
    place.call(cuda_logits.candidate_logits, reference_logits.candidate_logits, of, out_)
    return out_.obj


@operation
def select_candidate_rows(
    q8: A,
    kv_cache: AnyArray,
    w: AnyArray,
    candidates: AnyArray,
    lens: AnyArray,
    req_id: AnyArray,
    block_table: AnyArray,
    k: int,
    *,
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
    out: A | None = None,
) -> A:
    """The k keys with the largest logits for each query token, of those in its candidate blocks: `topk_indices` of
    `candidate_logits`, as positions in the request.

    Args:
        q8, kv_cache, w, candidates, lens, req_id, block_table: as for `candidate_logits`. Of a token with more blocks
            than C, the last candidate is its last block, as `candidate_blocks` has it where logits are finite. Else up
            to 7 keys of the last candidate are left out.
        k: 1 to 4096.
        max_workspace_bytes: limit of the memory for logits. Tokens are worked on in chunks that fit it, of at least
            one.
        out: [T, k] int32, written in place when given.

    Returns:
        [T, k] int32 positions, ascending; -1 behind the last.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a request that the block table does not have.

    Example:
        >>> cache = np.zeros((2, 64, 132), np.uint8)
        >>> keys = np.repeat(np.arange(20, dtype=np.float32)[:, None], 128, axis=1).astype(bfloat16)
        >>> cupy_mla.indexer_k_quant_and_cache(keys, cache, np.arange(64, 84))  # block 1
        >>> q8, w = np.ones((1, 8, 128), float8_e4m3fn), np.ones((1, 8), np.float32)
        >>> lens, request, table = np.array([18], np.int32), np.array([0], np.int32), np.array([[1]], np.int32)
        >>> candidates = np.array([[0, 2]], np.int32)  # keys 0 to 7, and the last two
        >>> cupy_mla.select_candidate_rows(q8, cache, w, candidates, lens, request, table, 3).tolist()
        [[7, 16, 17]]
    """
    k = require_integer("k", k, 1, MAX_K)
    max_workspace_bytes = require_integer("max_workspace_bytes", max_workspace_bytes, 1, MOST_BYTES)
    place, given = bind(
        q8=q8, kv_cache=kv_cache, w=w, candidates=candidates, lens=lens, req_id=req_id, block_table=block_table
    )
    (out_,) = place.optional(out=out)
    of = CandidateKeys(*given)
    tokens, _ = _require(of)
    out_ = place.output("out", out_, (tokens, k), INT32)
    place.call(cuda.select_candidate_rows, reference.select_candidate_rows, of, Selection(k, max_workspace_bytes, out_))
    return out_.obj


def _require(of: CandidateKeys) -> tuple[int, int]:
    """Check the arrays of logits over candidate blocks; returns the numbers of tokens and of blocks for each."""
    cuda_logits.require_known()
    tokens, heads, _ = require_rows(of.q8.require(MULTIPLIED, "T", HEADS, D)).shape
    indexer_layout(of.cache)
    of.w.require(FLOAT32, tokens, heads)
    _, blocks = of.candidates.require(INT32, tokens, "C").shape
    of.lens.require(INT32, tokens)
    of.req_id.require(INT32, tokens)
    requests, _ = of.table.require(INT32, "R", "width").shape
    if arrays.CHECK_VALUES:
        check_requests(of.req_id, requests)
    return tokens, blocks
