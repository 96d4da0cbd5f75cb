"""Index lists of the sliding window in plain NumPy."""

from __future__ import annotations

import numpy as np

from .indices import LARGEST, slots_of


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


def compute_swa_indices_and_lens(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    token_to_req: np.ndarray,
    is_valid_token: np.ndarray,
    block_table: np.ndarray,
    block_size: int,
    window_size: int,
    out: np.ndarray,
    lens: np.ndarray,
) -> None:
    """Slots of each decode token's window; see `cupy_mla.compute_swa_indices_and_lens`."""
    position = positions_of(np.arange(len(token_to_req)), token_to_req, query_start_loc, seq_lens)
    window = np.where(is_valid_token, np.minimum(position + 1, window_size), 0)
    entry = np.arange(window_size)
    attended = (position - window + 1)[:, None] + entry
    slots = slots_of(block_table, token_to_req[:, None], attended, block_size)
    out[...] = np.where((entry < window[:, None]) & (slots >= 0) & (slots <= LARGEST), slots, -1)
    lens[...] = window


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


def combine_topk_swa_indices(
    topk_indices: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    gather_lens: np.ndarray,
    window_size: int,
    compress_ratio: int,
    topk: int,
    rows: int,
    compressed_rows: int,
    out: np.ndarray,
    lens: np.ndarray,
) -> None:
    """Compressed and window rows of each prefill token; see `cupy_mla.combine_topk_swa_indices`."""
    out[...] = -1
    lens[...] = 0
    token = np.arange(len(topk_indices)) + query_start_loc[0]
    request = requests_of(token, query_start_loc)
    position = positions_of(token, request, query_start_loc, seq_lens)
    entry = np.arange(out.shape[1])
    for t in np.flatnonzero(position >= 0):
        r, p = request[t], position[t]
        n, w = min((p + 1) // compress_ratio, topk), min(p + 1, window_size)
        chosen = topk_indices[t, :n]
        out[t, :n] = np.where((chosen >= 0) & (chosen < compressed_rows), chosen + rows * r, -1)
        first = p - w + 1 - (int(seq_lens[r]) - int(gather_lens[r]))
        tail = first + entry[:w]
        gathered = (tail >= 0) & (tail < rows - compressed_rows)
        out[t, n : n + w] = np.where(gathered, rows * r + compressed_rows + tail, -1)
        lens[t] = n + w
