"""Index lists of the sliding window in plain NumPy."""

from __future__ import annotations

import numpy as np

from ..arguments import CombinedLists, SwaWindows
from .indices import LARGEST, find_slots


def positions_of(
    token: np.ndarray,
    request: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
) -> np.ndarray:
    """Place of each token in the sequence of its request, int64; -1 where it has no request or the place no sense."""
    if len(seq_lens) == 0:
        return np.full(token.shape, -1, np.int64)
    exists = (request >= 0) & (request < len(seq_lens))
    r = np.where(exists, request, 0)
    position = seq_lens[r].astype(np.int64) - query_start_loc[r + 1] + token
    return np.where(exists & (position >= 0) & (position <= LARGEST), position, -1)


def requests_of(token: np.ndarray, query_start_loc: np.ndarray) -> np.ndarray:
    """Request of each token, counted as `query_start_loc` counts; -1 for tokens past the last one's."""
    request = np.searchsorted(query_start_loc, token, side="right") - 1
    return np.where(request < len(query_start_loc) - 1, request, -1)


def compute_swa_indices_and_lens(a: SwaWindows) -> None:
    """Slots of each decode token's window; see `cupy_mla.compute_swa_indices_and_lens`."""
    position = positions_of(np.arange(len(a.token_to_req)), a.token_to_req, a.query_start_loc, a.seq_lens)
    window = np.where(a.is_valid_token, np.minimum(position + 1, a.window_size), 0)
    entry = np.arange(a.window_size)
    attended = (position - window + 1)[:, None] + entry
    slots = find_slots(a.block_table, a.token_to_req[:, None], attended, a.block_size)
    a.out[...] = np.where((entry < window[:, None]) & (slots >= 0) & (slots <= LARGEST), slots, -1)
    a.lens[...] = window


def compute_prefill_gather_lens(
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    num_decodes: int,
    window_size: int,
    out: np.ndarray,
) -> None:
    """Tokens that each prefill's windows reach; see `cupy_mla.compute_prefill_gather_lens`."""
    query_lens = np.diff(query_start_loc)[num_decodes:]
    out[...] = query_lens + np.minimum(seq_lens[num_decodes:] - query_lens, window_size - 1)


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
        n, w = min((p + 1) // a.compress_ratio, a.topk), min(p + 1, a.window_size)
        chosen = a.topk_indices[t, :n]
        a.out[t, :n] = np.where((chosen >= 0) & (chosen < a.compressed_rows), chosen + a.rows * r, -1)
        first = p - w + 1 - (int(a.seq_lens[r]) - int(a.gather_lens[r]))
        tail = first + entry[:w]
        gathered = (tail >= 0) & (tail < a.rows - a.compressed_rows)
        a.out[t, n : n + w] = np.where(gathered, a.rows * r + a.compressed_rows + tail, -1)
        a.lens[t] = n + w
