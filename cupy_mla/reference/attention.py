"""Sparse attention in plain NumPy: one query at a time, all its heads and rows in two float32 matrix products."""

from __future__ import annotations

import math

import numpy as np

from ..arguments import Decode, DenseDecode, Prefill
from ..dtypes import E4M3
from ..layouts import D_V
from .cache import rows_of
from .schedule import merge_partials, split_rows


@np.errstate(all="ignore")
def sparse_prefill(a: Prefill) -> None:
    """Attention over flat rows kv [s_kv, d_qk], indices [s_q, topk]; see `cupy_mla.sparse_prefill`."""
    q, flat = queries(a), a.kv[:, None]
    for i in range(len(q)):
        rows = rows_of(flat, a.layout, valid_entries(a.indices, i, a.length, i, len(a.kv)), a.k_scale)
        part, a.max_logits[i], part_lse = _attend(q[i], rows, a.sm_scale)
        a.out[i], a.lse[i] = _finish(part, part_lse, a.sink)


@np.errstate(all="ignore")
def sparse_decode(a: Decode) -> None:
    """Attention over slots of a paged cache [num_blocks, block_size, last axis]; see `cupy_mla.sparse_decode`."""
    caches = [(a.layout, a.cache, a.indices, a.length)]
    if a.extra is not None:
        caches.append((a.extra_layout or a.layout, a.extra, a.extra_indices, a.extra_length))
    q = queries(a)
    for i, j in np.ndindex(q.shape[:2]):
        rows = np.concatenate(
            [
                rows_of(paged, layout, valid_entries(slots, (i, j), count, i, math.prod(paged.shape[:2])), a.k_scale)
                for layout, paged, slots, count in caches
            ]
        )
        a.out[i, j], a.lse[i, :, j] = attend_in_splits(q[i, j], rows, a.sm_scale, a.num_splits, a.sink)


def queries(a: Prefill | Decode | DenseDecode) -> np.ndarray:
    """The queries as float32."""
    if a.q.itemsize == 2:  # bfloat16 or float16
        return a.q.astype(np.float32)
    return a.q.view(E4M3).astype(np.float32) * np.asarray(a.q_scale, np.float32)


def attend_in_splits(
    heads: np.ndarray, rows: np.ndarray, scale: float, num_splits: int | None, sink: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """out [h, 512] and lse [h] of a query's heads [h, d_qk] float32 over rows [n, d_qk] in splits that are merged."""
    splits = split_rows(len(rows), num_splits or 1)
    parts = [_attend(heads, rows[start:stop], scale) for start, stop in splits]
    merged = merge_partials([part for part, _, _ in parts], [part_lse for _, _, part_lse in parts])
    return _finish(*merged, sink)


def valid_entries(
    indices: np.ndarray,
    query: int | tuple[int, int],
    length: np.ndarray | None,
    request: int,
    capacity: int,
) -> np.ndarray:
    """The entries of one query's list that name a row. Those at or after the length are ignored."""
    entries = indices[query]
    if length is not None:
        entries = entries[: max(int(length[request]), 0)]
    return entries[(entries >= 0) & (entries < capacity)]


def _attend(heads: np.ndarray, rows: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Softmax attention of heads [h, d_qk] over rows [n, d_qk]: out [h, 512], max_logits [h], lse [h].

    Without rows out is 0 and both others are -inf, which `merge_partials` expects from an empty split.
    """
    if len(rows) == 0:
        nothing = np.full(len(heads), -np.inf)
        return np.zeros((len(heads), D_V), np.float32), nothing, nothing
    logits = heads @ rows.T
    logits *= np.float32(scale)
    top = logits.max(axis=1)
    weights = np.exp(logits - top[:, None])
    total = weights.sum(axis=1)
    out = weights @ rows[:, :D_V] / total[:, None]
    # In float64: top and the logarithm may cancel, and tests hold lse to an absolute error of 1e-6.
    return out, top, top + np.log(total, dtype=np.float64)


def _finish(out: np.ndarray, lse: np.ndarray, sink: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Apply the sink, and give a query without rows the results that callers see: out 0 and lse +inf."""
    empty = np.isneginf(lse)
    if sink is not None:
        out = out / (1 + np.exp(sink - lse))[:, None]
    return np.where(empty[:, None], 0, out), np.where(empty, np.inf, lse)
