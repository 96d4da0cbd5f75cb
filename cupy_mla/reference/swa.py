"""Index lists of the sliding window in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arguments import CombinedLists, SwaWindows
from .indices import LARGEST, find_slots


def positions_of(
    token: np.ndarray,
    request: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
) -> np.ndarray:
    """The position of each token in the sequence of its request, int64; -1 without a request, or if it is out of
    range."""
    if len(seq_lens) == 0:
        return np.full(token.shape, -1, np.int64)
    exists = (request >= 0) & (request < len(seq_lens))
    r = np.where(exists, request, 0)
    position = seq_lens[r].astype(np.int64) - query_start_loc[r + 1] + token
    return np.where(exists & (position >= 0) & (position <= LARGEST), position, -1)


def requests_of(token: np.ndarray, query_start_loc: np.ndarray) -> np.ndarray:
    """The request of each token by `query_start_loc`; -1 for tokens behind the last request."""
    request = np.searchsorted(query_start_loc, token, side="right") - 1
    return np.where(request < len(query_start_loc) - 1, request, -1)


def window_of(position: Any, window_size: int, left: Any, right: Any) -> tuple[Any, Any]:
    """The first and the last position of a token's window, int64. Its image has `left` positions before it and `right`
    behind it. The end of the sequence, and what the cache holds, are not considered."""
    reach = window_size - 1
    first = position - reach - np.maximum(np.asarray(left, np.int64) - reach, 0)
    return np.maximum(first, 0), position + np.asarray(right, np.int64)


def compute_swa_indices_and_lens(a: SwaWindows) -> None:
    """Slots of each decode token's window; see `cupy_mla.compute_swa_indices_and_lens`."""
    position = positions_of(np.arange(len(a.token_to_req)), a.token_to_req, a.query_start_loc, a.seq_lens)
    exists = a.is_valid_token & (position >= 0)
    of_request = np.where(exists, a.token_to_req, 0)
    left, right = (0, 0) if a.left_visible is None else (a.left_visible, a.right_visible)
    first, last = window_of(position, a.window_size, left, right)
    if len(a.seq_lens):
        last = np.minimum(last, a.seq_lens[of_request] - 1)
        first = first if a.replay_start is None else np.maximum(first, a.replay_start[of_request])
    width = a.out.shape[1]
    window = np.where(exists, np.clip(last - first + 1, 0, width), 0)
    entry = np.arange(width)
    attended = first[:, None] + entry
    slots = find_slots(a.block_table, a.token_to_req[:, None], attended, a.block_size)
    a.out[...] = np.where((entry < window[:, None]) & (slots >= 0) & (slots <= LARGEST), slots, -1)
    a.lens[...] = window


def compute_prefill_gather_lens(
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    num_decodes: int,
    window_size: int,
    replay_start: np.ndarray | None,
    out: np.ndarray,
) -> None:
    """Tokens that each prefill's windows reach; see `cupy_mla.compute_prefill_gather_lens`."""
    query_lens = np.diff(query_start_loc)[num_decodes:].astype(np.int64)
    before = seq_lens[num_decodes:] - query_lens - (0 if replay_start is None else replay_start[num_decodes:])
    out[...] = query_lens + np.clip(before, 0, window_size - 1)


def combine_topk_swa_indices(a: CombinedLists) -> None:
    """Compressed and window rows of each prefill token; see `cupy_mla.combine_topk_swa_indices`."""
    a.out[...] = -1
    a.lens[...] = 0
    token = np.arange(len(a.topk_indices)) + a.query_start_loc[0]
    request = requests_of(token, a.query_start_loc)
    position = positions_of(token, request, a.query_start_loc, a.seq_lens)
    entry = np.arange(a.out.shape[1])
    for t in np.flatnonzero(position >= 0):
        r, p = request[t], position[t]
        n = min((p + 1) // a.compress_ratio, a.topk) if a.compress_ratio else 0
        chosen = a.topk_indices[t, :n]
        a.out[t, :n] = np.where((chosen >= 0) & (chosen < a.compressed_rows), chosen + a.rows * r, -1)
        left, right = (0 if part is None else part[t] for part in (a.left_visible, a.right_visible))
        first, last = window_of(p, a.window_size, left, right)
        gathered_from = int(a.seq_lens[r]) - int(a.gather_lens[r])
        first, end = max(int(first), gathered_from), min(int(last) + 1, int(a.seq_lens[r]))
        w = min(max(end - first, 0), a.most)
        tail = first - gathered_from + entry[:w]
        gathered = tail < a.rows - a.compressed_rows
        a.out[t, n : n + w] = np.where(gathered, a.rows * r + a.compressed_rows + tail, -1)
        a.lens[t] = n + w
