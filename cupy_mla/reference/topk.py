"""Selection of the largest logits in plain NumPy."""

from __future__ import annotations

import numpy as np

from ..arguments import CandidateKeys, PagedKeys, RaggedKeys, Selection
from .indices import LARGEST, find_slots
from .logits import (
    CANDIDATE_BLOCK,
    candidate_logits,
    indexer_logits,
    paged_indexer_logits,
    positions_of,
    visible_keys,
)

OUTSIDE = -1  # the order of entries outside of their row's range; all others are at least 0


def topk_indices(
    logits: np.ndarray, k: int, starts: np.ndarray | None, ends: np.ndarray | None, out: np.ndarray
) -> None:
    """The k largest entries of each row's range, ascending by position; see `cupy_mla.topk_indices`."""
    rows, width = logits.shape
    begin = np.zeros(rows, np.int64) if starts is None else starts.clip(0, width).astype(np.int64)
    end = np.full(rows, width, np.int64) if ends is None else ends.clip(0, width).astype(np.int64)
    column = np.arange(width)
    order = np.where((column >= begin[:, None]) & (column < end[:, None]), ordered(logits), OUTSIDE)
    chosen = np.argsort(-order, axis=1, kind="stable")[:, :k]
    out[...] = -1
    positions = np.where(np.take_along_axis(order, chosen, 1) > OUTSIDE, chosen, width)
    positions.sort(axis=1)
    out[:, : positions.shape[1]] = np.where(positions < width, positions - begin[:, None], -1)


def ordered(logits: np.ndarray) -> np.ndarray:
    """Integers of at least 0 in the order of the logits: NaN is below every number, both zeros are equal."""
    bits = logits.astype(np.float32).view(np.int32).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    key = np.where(bits < 0, -magnitude, magnitude) + 2**31
    return np.where(np.isnan(logits), 0, key)


def select_rows(
    of: RaggedKeys,
    chosen: Selection,
    req_id: np.ndarray | None,
    block_table: np.ndarray | None,
    block_size: int | None,
) -> None:
    """Logits and top-k over ranges of key rows; see `cupy_mla.select_rows`."""
    k, max_workspace_bytes, out, blocks = chosen
    queries, keys = len(of.q8), len(of.k8)
    step = queries_at_once(keys, max_workspace_bytes)
    for first in range(0, queries, step):
        part = slice(first, first + step)
        some = of._replace(q8=of.q8[part], w=of.w[part], starts=of.starts[part], ends=of.ends[part])
        logits = np.empty((len(some.q8), keys), np.float32)
        indexer_logits(some, False, False, logits)
        topk_indices(logits, k, some.starts, some.ends, out[part])
        if blocks is not None:
            candidate_blocks(logits, some.starts, some.ends, blocks[part])
    if req_id is not None and block_table is not None and block_size is not None:
        to_slots(out, req_id, block_table, block_size)


def select_rows_paged(of: PagedKeys, chosen: Selection, max_context_len: int, slots: bool) -> None:
    """Logits and top-k over keys of a paged cache; see `cupy_mla.select_rows_paged`."""
    k, max_workspace_bytes, out, blocks = chosen
    requests, n = of.q8.shape[:2]
    ends = visible_keys(of.lens, n).reshape(-1)
    step = max(queries_at_once(max_context_len, max_workspace_bytes) // max(n, 1), 1)
    for first in range(0, requests, step):
        part, rows = slice(first, first + step), slice(first * n, (first + step) * n)
        some = of._replace(q8=of.q8[part], w=of.w[rows], lens=of.lens[part], table=of.table[part])
        logits = np.empty((len(some.q8) * n, max_context_len), np.float32)
        paged_indexer_logits(some, False, logits)
        topk_indices(logits, k, None, ends[rows], out[rows])
        if blocks is not None:
            candidate_blocks(logits, None, ends[rows], blocks[rows])
    if slots:
        to_slots(out, np.repeat(np.arange(requests), n), of.table, of.cache.shape[1])


def candidate_blocks(logits: np.ndarray, starts: np.ndarray | None, ends: np.ndarray | None, out: np.ndarray) -> None:
    """The blocks of 8 logits with the largest maxima of each row's range; see `cupy_mla.candidate_blocks`."""
    rows, width = logits.shape
    for i in range(rows):
        begin = 0 if starts is None else min(max(int(starts[i]), 0), width)
        row = logits[i, begin : width if ends is None else max(min(int(ends[i]), width), begin)]
        blocks = -(-len(row) // CANDIDATE_BLOCK)
        scores = np.full(blocks * CANDIDATE_BLOCK, -np.inf, np.float32)
        scores[: len(row)] = row
        scores = scores.reshape(blocks, CANDIDATE_BLOCK).max(axis=1)
        scores[np.isnan(scores)] = np.inf
        scores[blocks - 1 :] = np.inf
        topk_indices(scores[None], out.shape[1], None, None, out[i : i + 1])


def select_candidate_rows(of: CandidateKeys, chosen: Selection) -> None:
    """Logits and top-k over candidate blocks of keys; see `cupy_mla.select_candidate_rows`."""
    k, max_workspace_bytes, out, _ = chosen
    tokens, candidates = of.candidates.shape
    width = candidates * CANDIDATE_BLOCK
    ends = np.minimum(of.lens, width - -of.lens % CANDIDATE_BLOCK)  # the last block ends where its row does
    positions = np.append(positions_of(of.candidates), np.full((tokens, 1), -1), axis=1)
    step = queries_at_once(width, max_workspace_bytes)
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        some = CandidateKeys(
            of.q8[part], of.cache, of.w[part], of.candidates[part], of.lens[part], of.req_id[part], of.table
        )
        logits = np.empty((len(some.q8), width), np.float32)
        candidate_logits(some, logits)
        topk_indices(logits, k, None, ends[part], out[part])
        out[part] = np.maximum(np.take_along_axis(positions[part], out[part].astype(np.int64), axis=1), -1)


def queries_at_once(keys: int, max_workspace_bytes: int) -> int:
    """The number of queries whose logits fit the workspace; at least 1."""
    return max(max_workspace_bytes // (4 * max(keys, 1)), 1)


def to_slots(positions: np.ndarray, request: np.ndarray, block_table: np.ndarray, block_size: int) -> None:
    """Convert positions in requests to slots of the cache, in place; -1 stays."""
    slots = find_slots(block_table, request[:, None], positions.astype(np.int64), block_size)
    positions[...] = np.where(slots <= LARGEST, slots, -1)
